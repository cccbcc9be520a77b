"""The FutureMap of every backend: by slot, always there, any integer shape, read once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from builders import make_client
from pippin.backends.fake.device import FutureMap as FakeFutureMap
from pippin.backends.mlx.step import future_map as mlx_future_map


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
@pytest.mark.parametrize(
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
