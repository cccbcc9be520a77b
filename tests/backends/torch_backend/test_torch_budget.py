"""One budget for all that the torch backend holds of a device, on a device that is made up."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from pippin.backends.base import Admit, PrefillRow, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.config import read_shape
from pippin.backends.torch.memory import MemoryUse, largest_chunk, share_out
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import Pools, spare_slabs
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.step.sampler import TorchSampler
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import build_loop
from pippin.errors import LoadError, OutOfMemory
from pippin.types import Component, SamplingParams
from torch_serving import load_torch

sys.path.append(str(Path(__file__).parents[3] / "tools"))

from make_random_hybrid import QWEN3_5_0_8B

MIB = 1 << 20


class MadeUpDevice:
    """Of 100 MiB. Torch holds 3 MiB before pools, 1 MiB more with tables, and what pools take."""

    def __init__(self) -> None:
        self.total = 100 * MIB
        self.others = 0  # of other processes
        self.step_bytes = 5 * MIB
        self.caps: list[int | None] = []
        self.pools: list[weakref.ref[Pools]] = []
        self.num_given_back = 0

    def made(self) -> list[Pools]:
        found = [ref() for ref in self.pools]
        return [pools for pools in found if pools is not None and pools.memory.nbytes]

    def reserved(self) -> int:
        assert len(self.made()) <= 1, "one memory is made beside another"
        return 3 * MIB + sum(MIB + pools.memory.nbytes for pools in self.made())

    def outside(self) -> int:
        return 2 * MIB

    def free(self) -> int:
        return self.total - self.others - self.reserved() - self.outside()

    def peak(self, run: Callable[[], None]) -> int:
        run()
        return self.step_bytes

    def cap(self, nbytes: int | None) -> None:
        self.caps.append(nbytes)

    def give_back(self) -> None:
        self.num_given_back += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    found = MadeUpDevice()
    make = Pools.__init__

    def init(self: Pools, *args: Any) -> None:
        assert not found.made(), "one memory is made beside another"
        make(self, *args)
        found.pools.append(weakref.ref(self))

    monkeypatch.setattr(Pools, "__init__", init)
    return found


def make_backend(device: MadeUpDevice | None) -> TorchBackend:
    return TorchBackend(
        load_torch("qwen3_5"),
        num_slots=3,
        pool_bytes=None,
        kernels=False,
        prefill_tokens=100,
        meter=device,
    )


def run_a_prompt(backend: TorchBackend, *, retires: bool = True) -> Any:
    prompt = np.arange(3, 70, dtype=np.int32)
    admit = Admit(1, SamplingParams(temperature=0.0), (), prompt, seed=1)
    row = PrefillRow(1, 0, prompt, samples=True, captures=True, checkpoints=(64, 67))
    result = backend.launch(StepPlan(1, admit=(admit,), prefill=(row,))).wait()
    if retires:
        backend.launch(StepPlan(2, retire=(Retire(1),))).wait()
    return result


def test_pools_get_what_all_else_leaves_of_the_budget(device: MadeUpDevice) -> None:
    backend = make_backend(device)
    weights = backend.memory_used()
    assert not device.pools
    left = backend.limit_memory(60 * MIB)
    parts = backend.memory_parts()
    assert parts["weights"] == weights
    assert parts["pools"] == left
    assert parts["activations"] >= device.step_bytes
    assert parts["other"] >= 2 * MIB + MIB  # outside, tables
    # Of the budget no more is left over than one slab and those that nothing is counted in.
    slab = backend._layout.slab_bytes
    unused = 60 * MIB - sum(parts.values()) - spare_slabs(backend._layout) * slab
    assert 0 <= unused < slab
    (pools,) = device.made()
    assert pools.memory.nbytes == left + spare_slabs(backend._layout) * slab
    assert device.reserved() + device.outside() + device.step_bytes <= 60 * MIB
    assert device.caps[-1] == int(60 * MIB * 1.02) - device.outside()
    assert run_a_prompt(backend).tokens


def test_the_memory_of_requests_is_made_once_and_freed_before_another(device: MadeUpDevice) -> None:
    """One small memory is made for what is measured, and freed; the fixture sees two at a time."""
    backend = make_backend(device)
    backend.limit_memory(60 * MIB)
    assert len(device.pools) == 2
    small = backend.limit_memory(40 * MIB)
    assert len(device.pools) == 3  # nothing is measured again
    (pools,) = device.made()
    assert pools.capacity_bytes == small
    run_a_prompt(backend, retires=False)
    held = pools.arena.used_bytes
    assert held > 0
    assert backend.limit_memory(40 * MIB) == small - held
    assert len(device.pools) == 3


def test_what_is_tried_is_the_largest_chunk_and_all_rows_with_every_stage(
    device: MadeUpDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(device)
    chunks: list[int] = []
    sampled: list[tuple[int, bool]] = []
    launch, sample = TorchBackend.launch, TorchSampler.sample

    def note_chunk(self: TorchBackend, plan: StepPlan) -> Any:
        chunks.append(plan.num_prefill_tokens)
        return launch(self, plan)

    def note_rows(self: TorchSampler, logits: Any, rows: Any, masks: Any = None) -> Any:
        sampled.append((len(rows), masks is not None))
        return sample(self, logits, rows, masks)

    monkeypatch.setattr(TorchBackend, "launch", note_chunk)
    monkeypatch.setattr(TorchSampler, "sample", note_rows)
    backend.limit_memory(60 * MIB)
    assert max(chunks) == 100
    assert (3, True) in sampled
    assert not backend._slots


@pytest.mark.parametrize(
    ("max_len", "num_slots", "lengths"),
    [(1000, 4, [100]), (101, 4, [100]), (61, 4, [60, 40]), (21, 3, [20, 20, 20])],
)
def test_a_chunk_that_no_row_can_hold_is_made_of_several(
    max_len: int, num_slots: int, lengths: list[int]
) -> None:
    assert largest_chunk(100, max_len, num_slots) == lengths


def test_a_step_that_does_not_fit_is_an_error_with_both_numbers(device: MadeUpDevice) -> None:
    def run(_: Callable[[], None]) -> int:
        raise torch.OutOfMemoryError("tried to allocate 1 GiB")

    device.peak = run  # type: ignore[method-assign]
    backend = make_backend(device)
    words = r"a step of 100 tokens and 3 rows does not fit 31\.5 MB beside [\d.]+ [KM]B of weights"
    with pytest.raises(LoadError, match=words):
        backend.limit_memory(30 * MIB)
    assert not device.made()


def test_a_budget_below_the_weights_leaves_nothing_and_tries_nothing(device: MadeUpDevice) -> None:
    backend = make_backend(device)
    assert backend.limit_memory(backend.memory_used() + device.outside()) < 0
    assert not device.pools


def test_an_error_at_start_says_where_the_budget_went(device: MadeUpDevice) -> None:
    backend = make_backend(device)
    device.step_bytes = 40 * MIB
    config = Config(ModelConfig("model", backend="torch"), EngineConfig(memory=str(40 * MIB)))
    words = (
        r"a budget of 41\.9 MB, .* \(weights [\d.]+ KB, activations 41\.9 MB, .* needs [\d.]+ KB: "
    )
    with pytest.raises(LoadError, match=words):
        build_loop(config, lambda _: None, backend=backend)


def test_status_and_the_log_say_where_the_bytes_went(
    device: MadeUpDevice, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(ModelConfig("model", backend="torch"), EngineConfig(memory=str(60 * MIB)))
    with caplog.at_level(logging.INFO, logger="pippin"):
        loop = build_loop(config, lambda _: None, backend=make_backend(device))
    parts = loop.status()["memory"]["parts"]
    assert list(parts) == ["weights", "pools", "activations", "graphs", "other"]
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory: ")]
    assert f"pools {parts['pools']:,}, activations {parts['activations']:,}" in line
    assert line.endswith(f"bytes in all, of a budget of {60 * MIB:,}")


def test_a_hybrid_of_0_8b_parameters_fits_6_gb_with_room_for_32_rows() -> None:
    """With 1.6 GB of weights, 1.2 GB of activations, 0.5 GB of CUDA's own and 0.4 GB of tables."""
    layout = PoolLayout(read_shape(QWEN3_5_0_8B), torch.bfloat16)
    needs = MemoryUse(1_600_000_000, 0, 1_200_000_000, 300_000_000, 900_000_000)
    use = share_out(6_000_000_000, needs, layout, 32_768)
    assert sum(use.parts().values()) <= 6_000_000_000
    row = 1024 * layout.cell_bytes(Component.ATTENTION) + layout.state_bytes
    assert use.pools > 32 * row


def test_a_long_row_that_is_gathered_is_counted() -> None:
    layout = PoolLayout(read_shape(QWEN3_5_0_8B), torch.bfloat16)
    needs = MemoryUse()
    short, long = (share_out(10**10, needs, layout, max_len) for max_len in (1000, 10**9))
    assert short.activations == 1000 * (layout.kv_layer_bytes + 16)
    # However long a row may get, it holds no more tokens than there are cells.
    held = long.pools // layout.cell_bytes(Component.ATTENTION)
    seen = held * (layout.kv_layer_bytes + 16)
    assert 0 <= long.activations - seen < layout.slab_bytes


def test_where_nothing_can_be_measured_a_share_is_set_aside() -> None:
    backend = make_backend(None)
    weights = backend.memory_used()
    assert backend.limit_memory(weights + 100 * MIB) == 90 * MIB
    assert backend.memory_parts() == MemoryUse(weights, 90 * MIB, 10 * MIB, 0, 0).parts()


def test_close_frees_memory_that_payloads_still_name(device: MadeUpDevice) -> None:
    backend = make_backend(device)
    capacity = backend.limit_memory(60 * MIB)
    (capture,) = run_a_prompt(backend).captures
    runner = backend.runner
    tensors = [
        weakref.ref(tensor)
        for tensor in (
            runner.pools.memory,
            *runner.pools.kv,
            *runner.pools.recurrent,
            *runner.pools.conv,
            runner.rows.table,
        )
    ]
    parts = [weakref.ref(part) for part in (runner, runner.rows, runner.forwards)]
    del runner
    before = device.num_given_back
    backend.close()
    backend.close()
    gc.collect()
    assert not any(ref() is not None for ref in (*tensors, *parts))
    assert device.num_given_back > before
    assert device.caps[-1] is None
    assert backend.memory_used() == 0
    assert not any(backend.memory_parts().values())
    assert "_decoder" not in vars(backend)
    capture.release()  # by a tree that outlives it
    again = make_backend(device)
    assert again.limit_memory(60 * MIB) == capacity
    assert run_a_prompt(again).tokens


def test_a_payload_is_read_on_the_stream_that_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(None)
    backend.limit_memory(backend.memory_used() + 60 * MIB)
    inside: list[bool] = []

    @contextmanager
    def forward() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    (capture,) = run_a_prompt(backend).captures
    read: list[type] = []
    crc = "pippin.backends.torch.pools.payloads._crc"
    monkeypatch.setattr(crc, lambda content: read.append(inside == [True]) or 0)
    backend.runner.pools.forward = forward
    payloads = list(capture.payloads)
    assert {type(payload) for payload in payloads} == {KVPayload, StatePayload, HiddenPayload}
    for payload in payloads:
        payload.fingerprint()
    assert read == [True] * len(payloads)
    capture.release()


@pytest.mark.parametrize("left", [-1, 0])
def test_a_budget_of_a_slab_makes_a_pool_and_of_less_makes_none(
    device: MadeUpDevice, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launch does not make one of another size, outside the budget."""
    backend = make_backend(device)
    slab = backend._layout.slab_bytes
    monkeypatch.setattr(backend, "_share_out", lambda budget: MemoryUse(1000, slab + left))
    assert backend.limit_memory(60 * MIB) == (0 if left else slab)
    if not left:
        assert backend.runner.pools.capacity_bytes == slab
        return
    with pytest.raises(OutOfMemory, match=f"no slab of {slab:,} bytes .* pools {slab - 1:,}"):
        run_a_prompt(backend)


def test_no_more_is_taken_than_is_free(device: MadeUpDevice) -> None:
    left = {}
    for others, budget in ((50, 80), (0, 80), (0, 50)):
        device.others = others * MIB
        backend = make_backend(device)
        left[others, budget] = backend.limit_memory(budget * MIB)
        backend.close()
    assert left[0, 80] - left[50, 80] > 25 * MIB
    assert left[0, 50] - left[50, 80] <= backend._layout.slab_bytes
