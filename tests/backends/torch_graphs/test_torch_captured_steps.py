"""Steps by size, captured and launched: what runs when, and what happens if a capture fails."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from pippin.backends.torch.graphs.steps import CapturedSteps, Forwarded
from pippin.backends.torch.step.decode_inputs import Choice
from pippin.errors import DeviceFailed
from run_again import RunAgain


class Doubling:
    """Sizes are lengths: each run doubles as many words, and "draws" what it doubled."""

    def __init__(self, recorder: Any) -> None:
        self.ran: list[list[int]] = []
        future = torch.zeros(1, dtype=torch.int32)
        self.steps: CapturedSteps[int] = CapturedSteps(
            "doublings",
            recorder,
            8,
            lambda size: np.zeros(size, np.int32),
            self.double,
            lambda logits, inputs, future, choice: logits,
            future,
            torch.zeros(8, dtype=torch.int32),
        )

    def double(self, size: int, words: torch.Tensor) -> Forwarded:
        assert len(words) == size
        self.ran.append(words.tolist())
        return Forwarded(words * 2, inputs=None)  # type: ignore[arg-type]

    def run(self, *values: int) -> list[int]:
        found = self.steps.run(len(values), np.array(values, dtype=np.int32), Choice.GREEDY)
        return found.drawn.tolist()

    def prepare(self, *sizes: int) -> bool:
        return all(self.steps.prepare(size) for size in sizes)

    def sizes(self) -> set[int]:
        return {size for size, _ in self.steps.graphs}


def test_what_is_captured_reads_the_words_of_each_run() -> None:
    recorder = RunAgain()
    doubling = Doubling(recorder)
    for values in ((1, 2), (3,), (4, 5), (6,)):
        assert doubling.run(*values) == [2 * value for value in values]
    assert recorder.num_replays == 4
    assert doubling.sizes() == {1, 2}


def test_while_requests_run_nothing_is_captured() -> None:
    """A capture takes longer than a stream may wait."""
    recorder = RunAgain()
    doubling = Doubling(recorder)
    doubling.steps.busy = True
    assert doubling.prepare(1, 2, 3)
    assert not doubling.ran
    assert doubling.run(1, 2) == [2, 4]
    assert doubling.ran == [[1, 2]]
    assert doubling.run(3, 4) == [6, 8]
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
    doubling.run(1)
    recorder.fails_at = stage
    with caplog.at_level(logging.WARNING, logger="pippin"):
        for _ in range(3):
            assert doubling.run(1, 2) == [2, 4]
            assert doubling.run(1, 2, 3) == [2, 4, 6]
            assert doubling.run(5) == [10]
    assert [r.getMessage() for r in caplog.records] == [
        f"doublings are launched, not captured: no capture: {stage}"
    ]
    assert not doubling.steps.works
    assert doubling.sizes() == {1}
    assert recorder.num_replays == 4


def test_a_device_that_is_lost_in_a_capture_is_not_used_again() -> None:
    class Lost:
        def record(self, run: Any) -> Any:
            raise DeviceFailed("the GPU fails")

    doubling = Doubling(Lost())
    with pytest.raises(DeviceFailed):
        doubling.run(1)


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
        def double(self, size: int, words: torch.Tensor) -> Forwarded:
            if size > 2:
                raise RuntimeError("out of resource: shared memory")
            return super().double(size, words)

    doubling = Raising(RunAgain())
    assert [doubling.steps.can_run(size) for size in (3, 2, 3)] == [False, True, False]
    assert [record.getMessage() for record in caplog.records] == [
        "plain operations are used for doublings of some sizes: out of resource: shared memory"
    ]
    assert doubling.steps.works
    assert doubling.run(1, 2) == [2, 4]
