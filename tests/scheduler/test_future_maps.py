"""The FutureMap over every library of arrays: by slot, any integer shape, read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from cases import cases
from pippin.backends import fake
from pippin.backends.mlx.step import sampler as mlx_sampler
from pippin.backends.step.slots import Arrays, FutureMap
from processes import is_installed

MAX_DEPTH = 3


@dataclass(frozen=True)
class Kind:
    arrays: Arrays[Any]
    array: Callable[[np.ndarray], Any]

    def make(self, num_slots: int) -> FutureMap[Any]:
        return FutureMap(self.arrays, num_slots, max_depth=MAX_DEPTH, debug=True)

    def stash(self, future: FutureMap[Any], slots: Sequence[int], tokens: np.ndarray) -> None:
        numbers = np.array(slots, dtype=np.int64)
        future.stash(self.arrays.index(numbers), self.array(tokens))
        future.note_written(numbers)

    def read(self, future: FutureMap[Any], slots: Sequence[int]) -> list[int]:
        numbers = np.array(slots, dtype=np.int64)
        future.note_read(numbers)
        found: list[int] = np.asarray(future.tokens[self.arrays.index(numbers)]).tolist()
        return found

    def stash_drafts(
        self, future: FutureMap[Any], slots: Sequence[int], drafts: np.ndarray
    ) -> None:
        numbers = np.array(slots, dtype=np.int64)
        future.stash_drafts(self.arrays.index(numbers), self.array(drafts))
        future.note_drafts_written(numbers, drafts.shape[-1])

    def read_drafts(self, future: FutureMap[Any], slot: int, depth: int) -> list[int]:
        future.note_drafts_read(slot, depth)
        found: list[int] = np.asarray(future.drafts)[slot, :depth].tolist()
        return found


KINDS = {
    "fake": Kind(fake.ARRAYS, np.asarray),
    "mlx": Kind(mlx_sampler.ARRAYS, mx.array),
}
if is_installed("torch"):
    import torch

    from pippin.backends.torch.device import arrays_on

    KINDS["torch"] = Kind(arrays_on(torch.device("cpu")), torch.as_tensor)
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@every_kind
def test_tokens_are_found_by_slot_not_by_order(kind: Kind) -> None:
    future = kind.make(4)
    kind.stash(future, [3, 1], np.array([30, 10]))
    kind.stash(future, [4], np.array([40]))
    assert kind.read(future, [1, 4, 3]) == [10, 40, 30]


@every_kind
@cases(
    "tokens",
    [
        np.array([[7], [8]], dtype=np.int32),
        np.array([7, 8], dtype=np.int64),
        np.array([[7, 8]], dtype=np.uint32),
    ],
    ids=["(n,1)", "int64", "(1,n) uint32"],
)
def test_token_ids_of_any_shape_and_type(kind: Kind, tokens: np.ndarray) -> None:
    future = kind.make(4)
    kind.stash(future, [3, 1], tokens)
    assert kind.read(future, [1, 3]) == [8, 7]


@every_kind
def test_empty_batch(kind: Kind) -> None:
    future = kind.make(4)
    kind.stash(future, [], np.array([], dtype=np.int32))
    kind.stash_drafts(future, [], np.zeros((0, 2), dtype=np.int32))
    assert kind.read(future, []) == []
    assert kind.read_drafts(future, 2, 0) == []


@every_kind
def test_stale_read_after_slot_reuse(kind: Kind) -> None:
    """What was read is not read again: a slot's next owner cannot decode the last one's token."""
    future = kind.make(4)
    kind.stash(future, [1, 2], np.array([41, 42]))
    assert kind.read(future, [1]) == [41]
    for slot in (1, 3):  # never written, or read
        with pytest.raises(RuntimeError, match=f"slot {slot} has no token to read, or it was read"):
            kind.read(future, [slot])
    assert kind.read(future, [2]) == [42]


@every_kind
@cases("dtype", [np.int32, np.int64, np.uint8])
def test_drafts_are_found_by_slot(kind: Kind, dtype: type[np.generic]) -> None:
    future = kind.make(4)
    kind.stash_drafts(future, [3, 1], np.array([[30, 31, 32], [10, 11, 12]], dtype=dtype))
    kind.stash_drafts(future, [4], np.array([[40]], dtype=dtype))
    assert kind.read_drafts(future, 1, 3) == [10, 11, 12]
    assert kind.read_drafts(future, 4, 1) == [40]
    assert kind.read_drafts(future, 3, 2) == [30, 31]


@every_kind
def test_drafts_are_read_once_and_no_more_than_were_written(kind: Kind) -> None:
    future = kind.make(4)
    kind.stash_drafts(future, [2], np.array([[7, 8]]))
    assert kind.read_drafts(future, 2, 2) == [7, 8]
    with pytest.raises(RuntimeError, match="slot 2 has no 1 drafts to read, or they were read"):
        kind.read_drafts(future, 2, 1)
    kind.stash_drafts(future, [2], np.array([[7, 8, 9]]))
    kind.stash_drafts(future, [2], np.array([[5]]))
    with pytest.raises(RuntimeError, match="slot 2 has no 2 drafts to read"):
        kind.read_drafts(future, 2, 2)


@every_kind
def test_lengths_are_kept_by_slot(kind: Kind) -> None:
    future = kind.make(4)
    slots = kind.arrays.index(np.array([3, 1]))
    lengths, counts = kind.array(np.array([[30], [10]])), kind.array(np.array([2, 0]))
    future.stash_lengths(slots, lengths, counts)
    assert np.asarray(future.lengths).tolist() == [0, 10, 0, 30, 0]
    assert np.asarray(future.counts).tolist() == [0, 0, 0, 2, 0]
