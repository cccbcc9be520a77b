"""The order of a step, whatever computes it (`backends/base`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from pippin.backends.base import Admit, Capture, Load, Retire, Spill, StepPlan
from pippin.backends.step.pending import StepOutputs
from pippin.types import Payload

S = TypeVar("S", bound=StepOutputs)


class StepRunner(ABC, Generic[S]):
    """A device that runs steps: nothing here waits for it."""

    def execute(self, step: S, plan: StepPlan) -> None:
        self._begin(step, plan)
        for retire in plan.retire:
            if retire.captures:
                for capture in self._captured(step, retire):
                    step.keep(capture)
            self._free(step, retire.slot)
        for admit in plan.admit:
            self._start(step, admit)
        self._run(step, plan)
        for spill in plan.spill:  # after all that a client waits for
            step.spill(spill, self._gathered(spill))
        for payload in self._loaded_payloads(step, plan.load):
            step.load(payload)
        self._finish(step, plan)

    def _begin(self, step: S, plan: StepPlan) -> None:
        """What may run beside the rest."""

    @abstractmethod
    def _captured(self, step: S, retire: Retire) -> Iterable[Capture]:
        """The slot's KV of [start, end), as far as it is still held, and its state at `end`."""

    @abstractmethod
    def _free(self, step: S, slot: int) -> None:
        """It may hold nothing: the launch that would have admitted it failed."""

    @abstractmethod
    def _start(self, step: S, admit: Admit) -> None: ...

    @abstractmethod
    def _run(self, step: S, plan: StepPlan) -> None:
        """Decode rows and chunks, in either order: restore, run, capture, sample, draft."""

    @abstractmethod
    def _gathered(self, spill: Spill) -> Sequence[Any]:
        """Arrays of uint8, one for each of `payload_arrays`."""

    @abstractmethod
    def _loaded_payloads(self, step: S, loads: Sequence[Load]) -> Iterable[Payload]: ...

    def _finish(self, step: S, plan: StepPlan) -> None:
        """All of the step has been put in order."""
