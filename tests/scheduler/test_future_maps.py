"""The FutureMap of every backend: by slot, always there, any integer shape, read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from builders import make_client
from cases import cases
from pippin.backends.fake import FutureMap as FakeFutureMap
from pippin.backends.mlx.step import future_map as mlx_future_map
from processes import is_installed

MAX_DEPTH = 3


@dataclass(frozen=True)
class Kind:
    make: Callable[[int], Any]
    array: Callable[[np.ndarray], Any]
    read: Callable[[Any, list[int]], list[int]]


def read_fake(future_map: FakeFutureMap, slots: list[int]) -> list[int]:
    return [future_map.take(slot) for slot in slots]


def read_mlx(future_map: mlx_future_map.FutureMap, slots: list[int]) -> list[int]:
    tokens = future_map.resolve(np.array(slots, dtype=np.int32))
    assert tokens.dtype == mx.int32
    assert tokens.shape == (len(slots),)
    return [int(token) for token in np.asarray(tokens)]


KINDS = {
    "fake": Kind(FakeFutureMap, np.asarray, read_fake),
    "mlx": Kind(lambda n: mlx_future_map.FutureMap(n, debug=True), mx.array, read_mlx),
}


@dataclass(frozen=True)
class DraftKind:
    """A map that holds drafts too."""

    make: Callable[[int], Any]
    stash: Callable[[Any, list[int], np.ndarray], None]  # drafts, int [slots, n]
    read: Callable[[Any, int, int], list[int]]  # of a slot, so many


def stash_fake_drafts(future_map: FakeFutureMap, slots: list[int], drafts: np.ndarray) -> None:
    for slot, line in zip(slots, drafts.tolist(), strict=True):
        future_map.stash_drafts(slot, line)


def read_mlx_drafts(future_map: mlx_future_map.FutureMap, slot: int, depth: int) -> list[int]:
    (found,) = np.array(future_map.resolve_drafts(np.array([slot]), np.array([depth]))).tolist()
    return [int(token) for token in found]


DRAFT_KINDS = {
    "fake": DraftKind(
        lambda n: FakeFutureMap(n, MAX_DEPTH), stash_fake_drafts, FakeFutureMap.take_drafts
    ),
    "mlx": DraftKind(
        lambda n: mlx_future_map.FutureMap(n, max_depth=MAX_DEPTH, debug=True),
        lambda found, slots, drafts: found.stash_drafts(np.array(slots), mx.array(drafts)),
        read_mlx_drafts,
    ),
}
if is_installed("torch"):
    import torch

    from pippin.backends.torch.step.future_map import FutureMap as TorchFutureMap

    def make_torch(num_slots: int) -> TorchFutureMap:
        return TorchFutureMap(num_slots, torch.device("cpu"), max_depth=MAX_DEPTH, debug=True)

    def read_torch(future_map: TorchFutureMap, slots: list[int]) -> list[int]:
        future_map.note_read(np.array(slots, dtype=np.int64))
        tokens = future_map.resolve(torch.tensor(slots, dtype=torch.int64))
        assert tokens.dtype == torch.int64
        assert tokens.shape == (len(slots),)
        return [int(token) for token in tokens]

    class NotedFutureMap(TorchFutureMap):
        """Notes on the host what it stashes, as its callers do."""

        def stash(self, slots: Any, tokens: torch.Tensor) -> None:
            super().stash(torch.as_tensor(slots, dtype=torch.int64), tokens)
            self.note_written(np.asarray(slots))

    def stash_torch_drafts(
        future_map: TorchFutureMap, slots: list[int], drafts: np.ndarray
    ) -> None:
        future_map.stash_drafts(torch.tensor(slots, dtype=torch.int64), torch.as_tensor(drafts))
        future_map.note_drafts_written(np.array(slots, dtype=np.int64), drafts.shape[-1])

    def read_torch_drafts(future_map: TorchFutureMap, slot: int, depth: int) -> list[int]:
        future_map.note_drafts_read(slot, depth)
        (found,) = future_map.resolve_drafts(torch.tensor([slot]), depth)
        assert found.dtype == torch.int32
        return [int(token) for token in found]

    KINDS["torch"] = Kind(
        lambda n: NotedFutureMap(n, torch.device("cpu"), debug=True), torch.as_tensor, read_torch
    )
    DRAFT_KINDS["torch"] = DraftKind(make_torch, stash_torch_drafts, read_torch_drafts)
every_draft_kind = pytest.mark.parametrize("kind", DRAFT_KINDS.values(), ids=DRAFT_KINDS.keys())
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


@pytest.mark.parametrize("overlap", [True, False])
def test_future_map_absent_on_one_backend(overlap: bool) -> None:
    """It is made with the backend, whatever the loop's mode."""
    assert isinstance(make_client(overlap=overlap).backend.future_map, FakeFutureMap)


@every_kind
def test_tokens_are_found_by_slot_not_by_order(kind: Kind) -> None:
    future_map = kind.make(4)
    future_map.stash(np.array([3, 1]), kind.array(np.array([30, 10])))
    future_map.stash(np.array([4]), kind.array(np.array([40])))
    assert kind.read(future_map, [1, 4, 3]) == [10, 40, 30]


@every_kind
@cases(
    "tokens",
    [
        np.array([[7], [8]], dtype=np.int32),
        np.array([7, 8], dtype=np.int32),
        np.array([7, 8], dtype=np.int64),
        np.array([[7, 8]], dtype=np.uint32),
    ],
    ids=["(n,1)", "int32", "int64", "(1,n) uint32"],
)
def test_token_ids_of_shape_n_1_or_int32(kind: Kind, tokens: np.ndarray) -> None:
    future_map = kind.make(4)
    future_map.stash(np.array([3, 1]), kind.array(tokens))
    assert kind.read(future_map, [1, 3]) == [8, 7]


@every_kind
def test_empty_batch(kind: Kind) -> None:
    future_map = kind.make(4)
    nothing = np.array([], dtype=np.int32)
    future_map.stash(nothing, kind.array(nothing))
    assert kind.read(future_map, []) == []


@every_kind
def test_stale_read_after_slot_reuse(kind: Kind) -> None:
    """A cell that was read is poisoned: its next owner cannot decode the last owner's token."""
    future_map = kind.make(4)
    future_map.stash(np.array([1, 2]), kind.array(np.array([41, 42])))
    assert kind.read(future_map, [1]) == [41]
    with pytest.raises(RuntimeError, match="slot 1 has no token to read, or it was read twice"):
        kind.read(future_map, [1])
    assert kind.read(future_map, [2]) == [42]


@every_kind
def test_a_cell_that_was_never_written_cannot_be_read(kind: Kind) -> None:
    with pytest.raises(RuntimeError, match="no token"):
        kind.read(kind.make(4), [3])


@every_kind
def test_ring_wrap_around_aliasing(kind: Kind) -> None:
    """Many more writes than cells: each slot keeps its own token, however often others turn."""
    future_map = kind.make(2)
    future_map.stash(np.array([2]), kind.array(np.array([77])))
    for token in range(40):
        future_map.stash(np.array([1]), kind.array(np.array([token])))
        assert kind.read(future_map, [1]) == [token]
    assert kind.read(future_map, [2]) == [77]


# ---- drafts and lengths --------------------------------------------------------------------------


@every_draft_kind
@cases("dtype", [np.int32, np.int64, np.uint8])
def test_drafts_are_found_by_slot(kind: DraftKind, dtype: type[np.generic]) -> None:
    future_map = kind.make(4)
    kind.stash(future_map, [3, 1], np.array([[30, 31, 32], [10, 11, 12]], dtype=dtype))
    kind.stash(future_map, [4], np.array([[40]], dtype=dtype))
    assert kind.read(future_map, 1, 3) == [10, 11, 12]
    assert kind.read(future_map, 4, 1) == [40]
    assert kind.read(future_map, 3, 2) == [30, 31]


@every_draft_kind
def test_no_drafts_of_no_rows(kind: DraftKind) -> None:
    future_map = kind.make(4)
    kind.stash(future_map, [], np.zeros((0, 2), dtype=np.int32))
    assert kind.read(future_map, 2, 0) == []


@every_draft_kind
def test_drafts_are_read_once(kind: DraftKind) -> None:
    future_map = kind.make(4)
    kind.stash(future_map, [2], np.array([[7, 8]]))
    assert kind.read(future_map, 2, 2) == [7, 8]
    with pytest.raises(RuntimeError, match="slot 2 has no 1 drafts to read, or they were read"):
        kind.read(future_map, 2, 1)


@every_draft_kind
def test_no_more_drafts_are_read_than_were_written(kind: DraftKind) -> None:
    future_map = kind.make(4)
    kind.stash(future_map, [2], np.array([[7, 8, 9]]))
    kind.stash(future_map, [2], np.array([[5]]))
    with pytest.raises(RuntimeError, match="slot 2 has no 2 drafts to read"):
        kind.read(future_map, 2, 2)


@pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
def test_lengths_are_kept_by_slot() -> None:
    future_map = make_torch(4)
    empty = torch.zeros(0, dtype=torch.int64)
    future_map.stash_lengths(empty, empty, empty)
    slots = torch.tensor([3, 1])
    future_map.stash_lengths(slots, torch.tensor([[30], [10]]), torch.tensor([2, 0]))
    assert future_map.lengths.tolist() == [0, 10, 0, 30, 0]
    assert future_map.counts.tolist() == [0, 0, 0, 2, 0]
    assert future_map.lengths.dtype == future_map.counts.dtype == torch.int32


def test_lengths_and_counts_are_found_by_slot_and_padding_has_none() -> None:
    future_map = mlx_future_map.FutureMap(3, max_depth=2)
    future_map.stash_lengths(np.array([2, 0, 1]), mx.array([20, 99, 10]), mx.array([2, 9, 1]))
    future_map.stash_lengths(np.array([1]), mx.array([12]), mx.array([0]))
    assert np.array(future_map.lengths).tolist() == [0, 12, 20, 0]
    assert np.array(future_map.counts).tolist() == [0, 0, 2, 0]
