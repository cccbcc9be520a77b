"""A router's view of one engine, from its KV events alone: written against the published schemas.

The structs have the field names of vLLM's `kv_events.py`, in the order of SGLang's for arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

BLOCK = 64


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """Map-encoded."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class ArrayEvent(msgspec.Struct, tag=True, array_like=True):
    """As SGLang encodes it."""


class ArrayStored(ArrayEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class ArrayRemoved(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class ArrayCleared(ArrayEvent, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]
    attn_dp_rank: int | None = None


def hashes_of(tokens: Sequence[int], salt: bytes = b"") -> list[int]:
    """As `hash_page` of SGLang chains them."""
    found, digest = [], salt
    for at in range(0, len(tokens) - BLOCK + 1, BLOCK):
        block = np.array(tokens[at : at + BLOCK], dtype="<u4").tobytes()
        digest = hashlib.sha256(digest + block).digest()
        found.append(int.from_bytes(digest[:8], "big", signed=True))
    return found


class Router:
    def __init__(self, form: type[Batch | ArrayBatch] = Batch) -> None:
        self._decoder = msgspec.msgpack.Decoder(form)
        self.blocks: dict[tuple[str | None, int], set[int]] = {}  # by medium and group
        self.has_ends = False
        self.num_cleared = 0
        self.events: list[Any] = []

    def take(self, payload: bytes) -> None:
        for event in self._decoder.decode(payload).events:
            self.events.append(event)
            if isinstance(event, AllBlocksCleared | ArrayCleared):
                self.blocks.clear()
                self.num_cleared += 1
                continue
            group = getattr(event, "group_idx", None) or 0
            held = self.blocks.setdefault((event.medium, group), set())
            hashes = set(event.block_hashes)
            assert len(hashes) == len(event.block_hashes)
            if isinstance(event, BlockRemoved | ArrayRemoved):
                assert hashes <= held, "removed what was not stored"
                held -= hashes
                continue
            assert event.block_size == BLOCK
            assert len(event.token_ids) == BLOCK * len(event.block_hashes)
            assert not hashes & held, "stored what is stored"
            if not group:
                parent = event.parent_block_hash
                assert parent is None or parent in held, "stored behind a gap"
            self.has_ends |= group > 0
            held |= hashes

    def predict(self, prompt: Sequence[int], salt: bytes = b"", medium: str = "GPU") -> int:
        """Tokens of the prompt that need not be computed, in whole blocks, its last token never
        among them."""
        kv = self.blocks.get((medium, 0), set())
        ends = self.blocks.get((medium, 1), set()) if self.has_ends else kv
        found = 0
        for number, block in enumerate(hashes_of(prompt[:-1], salt), 1):
            if block not in kv:
                break
            if block in ends:
                found = number
        return found * BLOCK
