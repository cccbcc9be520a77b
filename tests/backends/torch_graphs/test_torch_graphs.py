"""How work is captured, on a CUDA that is made up; steps by size, and what a failure leaves."""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from pippin.backends.torch.graphs.capture import CaptureFailed, CudaGraphs
from pippin.backends.torch.graphs.steps import CapturedSteps, Forwarded
from pippin.backends.torch.step.decode_inputs import FIELDS, Choice
from pippin.backends.torch.step.words import StepSize
from pippin.errors import DeviceFailed
from run_again import RunAgain

GPU = torch.device("cuda", 0)


ROOT = Path(__file__).parents[3]


PLACE = "src/pippin/backends/torch/graphs/capture.py"


RELEASED = -1  # users of a pool that takes no other capture


STAGES = ("begin", "run", "invalidated", "instantiate")


class MadeUpCuda:
    """A stream, torch's allocator and its generator, in and out of capture mode.

    A capture fails when it begins, inside the work, when CUDA finds at its end that the work
    invalidated it, or when the graph is made executable.
    """

    def __init__(self, fails_at: str | None = None, is_lost: bool = False) -> None:
        self.fails_at, self.is_lost = fails_at, is_lost
        self.capturing = self.allocating = self.counting = False
        self.error: str | None = None  # that the next call reports
        self.pool_users: dict[str, int] = {}
        self.options: list[dict[str, Any]] = []
        self.num_waits = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graph = type("CUDAGraph", (), {"capture_begin": self.begin, "capture_end": self.end})
        graph.replay = lambda self: None  # type: ignore[attr-defined]
        for name, stand_in in {
            "CUDAGraph": graph,
            "graph_pool_handle": self.new_pool,
            "current_device": lambda: 0,
            "is_current_stream_capturing": lambda: self.capturing,
            "synchronize": self.synchronize,
            "empty_cache": lambda: None,
            "default_generators": [self],
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.leave, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)
        monkeypatch.setattr(torch, "ones", self.ones)

    def new_pool(self) -> str:
        name = f"memory {len(self.pool_users)}"
        self.pool_users[name] = 0
        return name

    def begin(self, **options: Any) -> None:
        self.options.append(options)
        pool = options["pool"]
        # torch keeps a pool that no graph uses any more as long as a tensor of it is alive.
        assert self.pool_users[pool] >= 0, "use_count > 0 INTERNAL ASSERT FAILED"
        self.allocating = True
        self.pool_users[pool] += 1
        self.fail("begin")
        self.capturing = self.counting = True

    def end(self) -> None:
        self.capturing = False
        if self.fails_at in ("run", "invalidated"):
            raise RuntimeError("operation failed due to a previous error during capture")
        self.allocating = self.counting = False
        self.fail("instantiate")

    def work(self) -> int:
        assert not gc.isenabled()
        self.fail("run")
        return 7

    def fail(self, stage: str) -> None:
        if self.fails_at == stage:
            self.error = "left over"
            raise RuntimeError(f"CUDA error at {stage}")

    def leave(self, device: int, pool: str) -> None:
        if not self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating = False

    def release(self, device: int, pool: str) -> None:
        self.pool_users[pool] -= 1
        if self.pool_users[pool] == 0:
            self.pool_users[pool] = RELEASED

    def synchronize(self, device: object = None) -> None:
        assert not self.capturing
        self.num_waits += 1
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")
        if self.error is not None:
            self.error = None
            raise RuntimeError("left over")

    def ones(self, *shape: int, device: object) -> torch.Tensor:
        assert (self.capturing, self.allocating, self.error) == (False, False, None)
        return torch.full((1,), 1.0)

    def clone_state(self) -> str:
        return "a generator that counts for no graph"

    def graphsafe_set_state(self, state: str) -> None:
        self.counting = False


def test_a_capture_lets_other_threads_call_cuda_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In CUDA's own mode any other thread's call, say an allocation, breaks the capture."""
    cuda = MadeUpCuda()
    cuda.install(monkeypatch)
    graphs = CudaGraphs(GPU)
    assert [graphs.record(cuda.work).result for _ in range(2)] == [7, 7]
    assert gc.isenabled()
    assert cuda.options == [{"pool": "memory 0", "capture_error_mode": "thread_local"}] * 2
    assert cuda.num_waits == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_capture_that_fails_leaves_nothing_behind(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = MadeUpCuda(stage)
    cuda.install(monkeypatch)
    graphs = CudaGraphs(GPU)
    with pytest.raises(CaptureFailed):
        graphs.record(cuda.work)
    assert (cuda.capturing, cuda.allocating, cuda.counting) == (False, False, False)
    assert cuda.error is None
    assert gc.isenabled()
    # A graph that was ended gives its own share of the memory back when it is collected.
    assert cuda.pool_users["memory 0"] == (1 if stage == "instantiate" else RELEASED)
    cuda.fails_at = None
    assert graphs.record(cuda.work).result == 7


@pytest.mark.parametrize("stage", STAGES)
def test_a_gpu_that_is_lost_in_a_capture_ends_the_engine_with_a_clear_error(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MadeUpCuda(stage, is_lost=True).install(monkeypatch)
    with pytest.raises(DeviceFailed, match=r"CUDA graph could not be captured .*illegal memory"):
        CudaGraphs(GPU).record(lambda: 7)


def test_nobody_else_captures() -> None:
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tools/*.py")]
    found = {
        str(path.relative_to(ROOT))
        for path in files
        if re.search(r"cuda\.graph\(|capture_begin\(", path.read_text())
    }
    assert found == {PLACE}


LAYOUT: Any = SimpleNamespace(
    conv_shape=(0, 0),
    num_recurrent_layers=0,
    waste_cell=0,
    dtype=torch.int32,
    shape=SimpleNamespace(vocab_size=1, hidden=1),
)


class Doubling:
    """A forward of so many rows doubles their slots, and "draws" what it doubled."""

    def __init__(self, recorder: Any) -> None:
        self.ran: list[list[int]] = []
        cpu = torch.device("cpu")
        self.steps = CapturedSteps(self, LAYOUT, recorder, [StepSize(8)], cpu)  # type: ignore[arg-type]

    def run(self, size: StepSize, words: torch.Tensor) -> Forwarded:
        assert len(words) == size.num_rows * len(FIELDS)
        self.ran.append(words[: size.num_rows].tolist())
        return Forwarded(words[: size.num_rows, None] * 2, inputs=None)  # type: ignore[arg-type]

    def choose(self, forwarded: Forwarded, choice: Choice) -> torch.Tensor:
        return forwarded.logits[:, 0]

    def double(self, *values: int) -> list[int]:
        words = np.zeros(len(values) * len(FIELDS), dtype=np.int32)
        words[: len(values)] = values
        return self.steps.run(StepSize(len(values)), words, Choice.GREEDY).drawn.tolist()

    def prepare(self, *sizes: int) -> bool:
        return all(self.steps.prepare(StepSize(size)) for size in sizes)

    def sizes(self) -> set[int]:
        return {size.num_rows for size, _ in self.steps.graphs}


def test_what_is_captured_reads_the_words_of_each_run() -> None:
    recorder = RunAgain()
    doubling = Doubling(recorder)
    for values in ((1, 2), (3,), (4, 5), (6,)):
        assert doubling.double(*values) == [2 * value for value in values]
    assert recorder.num_replays == 4
    assert doubling.sizes() == {1, 2}


def test_while_requests_run_nothing_is_captured() -> None:
    """A capture takes longer than a stream may wait."""
    recorder = RunAgain()
    doubling = Doubling(recorder)
    doubling.steps.busy = True
    assert doubling.prepare(1, 2, 3)
    assert not doubling.ran
    assert doubling.double(1, 2) == [2, 4]
    assert doubling.ran == [[1, 2]]
    assert doubling.double(3, 4) == [6, 8]
    assert not doubling.sizes()
    assert recorder.num_replays == 0
    doubling.steps.busy = False
    assert doubling.prepare(1, 2, 3)
    assert doubling.sizes() == {1, 2, 3}


@pytest.mark.parametrize("stage", ["begin", "run", "end"])
def test_a_capture_that_fails_is_reported_once_and_what_was_captured_is_still_replayed(
    stage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RunAgain()
    doubling = Doubling(recorder)
    doubling.double(1)
    recorder.fails_at = stage
    with caplog.at_level(logging.WARNING, logger="pippin"):
        for _ in range(3):
            assert doubling.double(1, 2) == [2, 4]
            assert doubling.double(1, 2, 3) == [2, 4, 6]
            assert doubling.double(5) == [10]
    assert [r.getMessage() for r in caplog.records] == [
        f"decode steps are launched, not captured: no capture: {stage}"
    ]
    assert not doubling.steps.works(StepSize(1))
    assert doubling.steps.works(StepSize(1, span=3)), "another kind"
    assert doubling.sizes() == {1}
    assert recorder.num_replays == 4


def test_a_device_that_is_lost_in_a_capture_is_not_used_again() -> None:
    class Lost:
        def record(self, run: Any) -> Any:
            raise DeviceFailed("the GPU fails")

    doubling = Doubling(Lost())
    with pytest.raises(DeviceFailed):
        doubling.double(1)


def test_a_size_is_launched_once_before_all_its_ways_to_choose_are_captured() -> None:
    recorder = RunAgain()
    doubling = Doubling(recorder)
    assert doubling.prepare(3)
    assert len(doubling.steps.graphs) == len(Choice)
    assert len(doubling.ran) == 1 + len(Choice)


def test_work_that_raises_before_its_capture_is_noted_and_left_to_plain_operations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Launched it would raise again: only other sizes are run."""

    class Raising(Doubling):
        def run(self, size: StepSize, words: torch.Tensor) -> Forwarded:
            if size.num_rows > 2:
                raise RuntimeError("out of resource: shared memory")
            return super().run(size, words)

    doubling = Raising(RunAgain())
    assert [doubling.steps.can_run(StepSize(size)) for size in (3, 2, 3)] == [False, True, False]
    assert [record.getMessage() for record in caplog.records] == [
        "plain operations are used for decode steps of some sizes: out of resource: shared memory"
    ]
    assert doubling.steps.works(StepSize(1))
    assert doubling.double(1, 2) == [2, 4]
