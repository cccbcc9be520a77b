"""Entries for tests of the disk store: small payloads whose bytes follow from their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pippin.cache.disk.directory import Files
from pippin.cache.entries import ArraySpec, Bytes, Chain, Entry, EntryStore, Key
from pippin.types import Component

FINGERPRINT = b"a model"
ROOT = Chain(FINGERPRINT)
KV = Component.ATTENTION


class Unsynced(Files):
    """Does not wait for the disk itself, which takes long and which no test can check."""

    def sync(self, file: int) -> None:
        pass


def tokens(*ids: int) -> bytes:
    return np.array(ids, dtype=np.int32).tobytes()


def kv_entry(
    above: Chain, ids: Sequence[int], component: Component = KV, width: int = 5
) -> tuple[Entry, Chain]:
    """KV of `ids` after `above`: keys [2, n, width] of float16, values [n, width] of float32."""
    chain = above.extended(tokens(*ids))
    arrays = (
        ArraySpec("0.keys", "float16", (len(ids), 2, width), token_axis=0),
        ArraySpec("0.values", "float32", (len(ids), width), token_axis=0),
    )
    key = Key(chain.key, component, len(ids))
    return Entry(key, above.key, above.length, tokens(*ids), arrays), chain


def state_entry(above: Chain, ids: Sequence[int] = (), size: int = 33) -> tuple[Entry, Chain]:
    chain = above.extended(tokens(*ids))
    arrays = (ArraySpec("1.state", "float32", (size,)),)
    key = Key(chain.key, Component.STATE, 0)
    return Entry(key, above.key, above.length, tokens(*ids), arrays), chain


def payload(entry: Entry) -> list[Bytes]:
    """What belongs to an entry: random bytes whose seed is its name."""
    name = (
        entry.key.chain + entry.key.component.value.encode() + bytes([entry.key.num_tokens % 256])
    )
    generator = np.random.default_rng(list(name))
    return [generator.integers(0, 256, spec.nbytes, dtype=np.uint8) for spec in entry.arrays]


def finds(store: EntryStore[Any], entries: Sequence[Entry]) -> list[bool]:
    """Which of these are there; those must be what `payload` says, to the bit."""
    into = [entry.new_buffers() for entry in entries]
    found = store.read([entry.key for entry in entries], into)
    for entry, arrays, is_there in zip(entries, into, found, strict=True):
        assert not is_there or all(map(np.array_equal, arrays, payload(entry))), entry
    return found


def finds_all(store: EntryStore[Any], entries: Sequence[Entry]) -> bool:
    return all(finds(store, entries))
