"""Entries divide along their tokens."""

from __future__ import annotations

import numpy as np
import pytest
from disk_builders import FINGERPRINT, ROOT, kv_entry, payload, state_entry

from memory_store import MemoryStore
from pippin.cache.entries import ArraySpec, Entry


def test_a_part_of_an_array_is_that_of_its_tokens() -> None:
    entry, _ = kv_entry(ROOT, range(10))
    spec, data = entry.arrays[0], payload(entry)[0]
    whole = data.view(np.uint16).reshape(10, 2, 5)
    part = spec.tokens(data, 3, 7).view(np.uint16)
    np.testing.assert_array_equal(part.reshape(4, 2, 5), whole[3:7])


def test_an_entry_that_does_not_divide_as_it_says_is_refused() -> None:
    entry, _ = kv_entry(ROOT, range(4))
    for wrong in (
        ArraySpec("x", "float32", (3, 5), token_axis=0),
        ArraySpec("x", "float32", (4, 5), token_axis=None),
        ArraySpec("x", "float32", (5, 4), token_axis=1),
        ArraySpec("x", "complex256", (4, 5), token_axis=0),
    ):
        with pytest.raises(ValueError, match="does not divide"):
            Entry(entry.key, entry.parent, entry.start, entry.tokens, (wrong,))


def test_bytes_of_another_size_are_the_callers_mistake() -> None:
    entry, _ = state_entry(ROOT, [1])
    with pytest.raises(ValueError, match="write them whole"):
        MemoryStore(FINGERPRINT, 1 << 20).write(entry, [np.zeros(3, np.uint8)])
