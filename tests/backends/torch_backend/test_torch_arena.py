"""Cells and states out of one memory: random holders against plain counting, and moves."""

from __future__ import annotations

import numpy as np
import pytest

from cases import cases

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from pippin.backends.base import PrefillRow, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.config import read_shape
from pippin.backends.torch.pools.arena import SLABS_TO_KEEP_FREE
from pippin.backends.torch.pools.layout import FIRST_SLAB, ZERO_SLAB, PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.payloads import KVPayload, StatePayload
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.batches import take_chunks
from pippin.errors import OutOfMemory
from pippin.types import Component
from torch_families import TORCH_CONFIGS
from torch_serving import load_torch

CPU = torch.device("cpu")
KV = Component.ATTENTION
NO_CELLS = np.zeros(0, dtype=np.int32)


def make_pools(name: str = "qwen3_5", num_slabs: int = 6) -> Pools:
    layout = PoolLayout(read_shape(TORCH_CONFIGS[name]), torch.float32)
    return Pools(layout, num_slabs * layout.slab_bytes, CPU)


def take_payload(pools: Pools, num_tokens: int, mark: float) -> KVPayload:
    """KV that nobody else holds, filled with a number of its own."""
    pools.arena.make_room(num_tokens, 0)
    cells = pools.arena.cells[KV].take(num_tokens)
    for kv in pools.kv:
        kv[pools.index(cells)] = mark
    return KVPayload(pools, KV, cells)


def marks_of(pools: Pools, cells: np.ndarray) -> set[float]:
    return set(torch.stack([kv[pools.index(cells)] for kv in pools.kv]).unique().tolist())


def test_states_and_cells_are_views_that_do_not_overlap() -> None:
    pools = make_pools()
    pools.memory.zero_()
    slab = pools.arena.take_state()
    for views in (pools.recurrent, pools.conv):
        for number, view in enumerate(views):
            assert not view[slab].any()
            view[slab] = number + 1
    for views in (pools.recurrent, pools.conv):
        assert [set(view[slab].unique().tolist()) for view in views] == [
            {number + 1} for number in range(len(views))
        ]
    payload = take_payload(pools, pools.layout.cells_per_slab(KV) + 1, mark=9.0)
    assert pools.recurrent[0][slab].unique().tolist() == [1]
    assert marks_of(pools, payload.cells) == {9.0}
    assert not pools.state_bytes(ZERO_SLAB).any()


def test_what_layers_say_they_keep_is_what_a_slab_and_a_cell_take() -> None:
    for name in TORCH_CONFIGS:
        layout = make_pools(name).layout
        specs = layout.layer_specs()
        by_component: dict[str, int] = {}
        for spec in specs:
            found = by_component.get(spec.component.value, 0)
            by_component[spec.component.value] = found + spec.nbytes
        for kind in (Component.ATTENTION, Component.WINDOW):
            assert by_component.get(kind.value, 0) == layout.cell_bytes(kind)
        assert by_component.get("state", 0) == layout.state_bytes
        assert len(specs) == len(layout.shape.layers)


def test_a_row_and_a_plan_that_was_lent_a_payload_follow_its_cells() -> None:
    pools = make_pools(num_slabs=2)
    rows = Rows(pools, num_slots=2, max_len=64)
    per_slab = pools.layout.cells_per_slab(KV)
    first, lent = (take_payload(pools, per_slab, mark=mark) for mark in (1.0, 2.0))
    few, rest = first.split(3)
    rest.release()
    head, tail = lent.split(2)
    tail.split(1)[1].release()
    rows.borrow(1, 2, head.cells, NO_CELLS, ZERO_SLAB)  # type: ignore[attr-defined]
    pools.arena.make_room(0, 1)
    assert marks_of(pools, rows.held(1, 0, 2)) == {2.0}
    assert set(lent.cells[:2].tolist()) == set(rows.held(1, 0, 2).tolist())
    assert marks_of(pools, few.cells) == {1.0}  # type: ignore[attr-defined]
    pools.arena.check_integrity()


def test_more_than_there_is_raises_and_changes_nothing() -> None:
    pools = make_pools(num_slabs=2)
    payload = take_payload(pools, 3, mark=1.0)
    for cells, states in ((0, 2), (2 * pools.layout.cells_per_slab(KV) - 2, 0), (0, 3)):
        with pytest.raises(OutOfMemory):
            pools.arena.make_room(cells, states)
    pools.arena.make_room(pools.layout.cells_per_slab(KV) - 3, 1)
    payload.release()
    pools.arena.check_integrity()


def test_a_state_that_two_hold_is_written_elsewhere() -> None:
    pools = make_pools()
    rows = Rows(pools, num_slots=2, max_len=64)
    slots = np.array([1])
    (before,), (first,) = rows.next_states(slots)
    assert before == ZERO_SLAB
    assert rows.next_states(slots) == (np.array([first]), np.array([first]))
    payload = StatePayload.of(pools, int(first))
    (read,), (written,) = rows.next_states(slots)
    assert (read, written != first) == (first, True)
    payload.release()
    rows.retire(1)
    pools.arena.check_integrity()
    assert len(pools.arena._free) == pools.arena.num_slabs - FIRST_SLAB


def test_no_row_of_a_forward_writes_the_state_that_another_one_reads() -> None:
    """Two rows were restored from one state, which the tree has dropped meanwhile."""
    pools = make_pools(num_slabs=100)
    rows = Rows(pools, num_slots=3, max_len=256)
    slab = pools.arena.take_state()
    for slot in (1, 2):
        rows.borrow(slot, 0, NO_CELLS, NO_CELLS, slab)
    pools.arena.release_state(slab)
    chunks = [
        PrefillRow(slot, 0, np.zeros(128, dtype=np.int32), captures=True, checkpoints=(64,))
        for slot in (1, 2, 3)
    ]
    taken = take_chunks(chunks, rows, pools)
    assert taken.states_in.tolist() == [slab, slab, ZERO_SLAB]
    written = [*taken.states_out.tolist(), *(tap.slab for tap in taken.taps)]
    assert slab not in written
    assert len(set(written)) == 6
    assert slab in pools.arena._free


def scattered(pools: Pools, num_slabs: int) -> list[tuple[float, KVPayload]]:
    """Two cells in each of so many slabs."""
    payloads = [take_payload(pools, pools.layout.cells_per_slab(KV), n) for n in range(num_slabs)]
    kept = []
    for number, payload in enumerate(payloads):
        few, rest = payload.split(2)
        assert isinstance(few, KVPayload)
        rest.release()
        kept.append((float(number), few))
    return kept


def test_slabs_become_free_ahead_of_need_a_few_bytes_at_a_time() -> None:
    """What is held can be read, released and taken between any two moves."""
    pools = make_pools(num_slabs=12)
    rows = Rows(pools, num_slots=1, max_len=64)
    kept = scattered(pools, 12)
    rows.borrow(1, 2, kept[5][1].cells, NO_CELLS, ZERO_SLAB)
    at_most = 3 * pools.layout.cell_bytes(KV)
    num_free = [len(pools.arena._free)]
    while moved := pools.arena.compact(at_most):
        assert moved <= at_most
        num_free.append(len(pools.arena._free))
        assert num_free[-1] - num_free[-2] <= 2
        for mark, payload in kept:
            assert marks_of(pools, payload.cells) == {mark}
        assert marks_of(pools, rows.held(1, 0, 2)) == {5.0}
        pools.arena.check_integrity()
        if len(num_free) == 4:
            kept.pop(0)[1].release()
            kept.append((99.0, take_payload(pools, 1, mark=99.0)))
    assert len(num_free) > 4
    assert num_free[-1] == num_free[0] + 11


def test_a_slab_that_is_half_emptied_is_there_for_a_step_that_needs_it() -> None:
    pools = make_pools(num_slabs=4)
    kept = scattered(pools, 4)
    assert pools.arena.compact(pools.layout.cell_bytes(KV)) > 0
    room = 4 * pools.layout.cells_per_slab(KV) - 8
    kept.append((9.0, take_payload(pools, room, mark=9.0)))
    pools.arena.check_integrity()
    assert all(marks_of(pools, payload.cells) == {mark} for mark, payload in kept)
    assert pools.arena.compact(1 << 30) == 0
    with pytest.raises(OutOfMemory):
        pools.arena.make_room(1, 0)


def test_cells_of_one_kind_alone_are_never_moved_ahead_of_need() -> None:
    pools = make_pools("llama", num_slabs=12)
    scattered(pools, 12)
    assert pools.arena.compact(1 << 30) == 0


def test_a_step_moves_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchBackend(load_torch("qwen3_5"), num_slots=2, pool_bytes=1 << 20, kernels=False)
    pools, nbytes = backend.runner.pools, backend._layout.cell_bytes(KV)
    monkeypatch.setattr("pippin.backends.torch.runner.MOST_MOVED_BYTES", 3 * nbytes)
    num_slabs = len(pools.arena._free)
    with torch.inference_mode():
        scattered(pools, num_slabs)
    moved: list[int] = []
    set_cells = pools._move_cells
    for pool in pools.arena.cells.values():
        monkeypatch.setattr(
            pool, "_move_cells", lambda old, new: (moved.append(len(old)), set_cells(KV, old, new))
        )
    steps = 0
    while len(pools.arena._free) < min(num_slabs - 1, SLABS_TO_KEEP_FREE):
        steps += 1
        before = sum(moved)
        backend.launch(StepPlan(steps)).wait()
        assert 0 < sum(moved) - before <= 3


@pytest.mark.slow
@cases("seed", range(12))
def test_random_holders_keep_what_they_hold(seed: int) -> None:
    """As long as the bytes fit, however they are scattered, what is asked for is found."""
    rng = np.random.default_rng(seed)
    pools = make_pools(num_slabs=8)
    capacity = 8 * pools.layout.slab_bytes
    kv: dict[KVPayload, float] = {}
    states: dict[StatePayload, float] = {}
    for mark in map(float, range(1, 200)):
        held = sum(p.nbytes for p in (*kv, *states))
        num_tokens = int(rng.integers(1, 2 * pools.layout.cells_per_slab(KV)))
        action = rng.integers(5)
        if action == 0 and held + pools.layout.state_bytes <= capacity:
            pools.arena.make_room(0, 1)
            state = StatePayload(pools, pools.arena.take_state())
            pools.recurrent[0][state.slab] = mark
            states[state] = mark
        elif action <= 2 and held + num_tokens * pools.layout.cell_bytes(KV) <= capacity:
            kv[take_payload(pools, num_tokens, mark)] = mark
        elif action == 3 and kv:
            payload = list(kv)[rng.integers(len(kv))]
            number = kv.pop(payload)
            if payload.num_tokens > 1:
                head, tail = payload.split(int(rng.integers(1, payload.num_tokens)))
                assert isinstance(head, KVPayload)
                kv[head] = number
                tail.release()
            else:
                payload.release()
        elif states:
            payload = list(states)[rng.integers(len(states))]
            del states[payload]
            payload.release()
        moved = pools.arena.compact(int(rng.integers(8)) * pools.layout.cell_bytes(KV))
        assert moved <= 7 * pools.layout.cell_bytes(KV)
        pools.arena.check_integrity()
        assert pools.arena.used_bytes == sum(p.nbytes for p in (*kv, *states))
        assert all(marks_of(pools, p.cells) == {number} for p, number in kv.items())
        for state, number in states.items():
            assert pools.recurrent[0][state.slab].unique().tolist() == [number]
