"""Moves made-up payloads through steps before a request's prefix is moved. Knows no tree, no store.

On GPUs the first copy of a size pins memory of the host, and the first step that spills or loads
has kernels loaded and memory of the device allocated: streams would wait for it. So payloads of
zeros are loaded from a tier's buffer, spilled again, and a made-up prompt is restored from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from pippin.backends.base import (
    Admit,
    Backend,
    DecodeRow,
    Load,
    PrefillRow,
    Restore,
    Retire,
    Spill,
    StepPlan,
    StepResult,
)
from pippin.cache.tiers.tier_io import TierIO
from pippin.types import GRID, Component, Payload, SamplingParams

LEAST_BYTES = 1 << 20  # of a copy: pinned memory for less is allocated in blocks of this size
NUM_AT_ONCE = 2  # copies of the largest size, of a load each
SLOT = 1


@dataclass(frozen=True)
class TierWarmUp:
    backend: Backend
    tier_io: TierIO
    batch_bytes: int  # of the largest copy

    def run(self, steps: Iterator[int], can_hold: Callable[[int], bool]) -> None:
        """Sizes halve from one to the next: memory is pinned in powers of two. Only while no slot
        is held; what does not fit is passed over."""
        spec = self.backend.spec
        per_token = max(spec.kv_bytes_per_token, spec.window_bytes_per_token, 1)
        most = max(1, min(self.batch_bytes // per_token, spec.max_len - GRID - 2))
        most -= most % GRID if most > GRID else 0  # where prefixes end on the grid, too
        lengths = [most >> n for n in range(most.bit_length()) if most >> n]
        lengths = [n for n in lengths if n == most or n * per_token >= LEAST_BYTES]
        for number, length in enumerate(lengths):
            num_loads = NUM_AT_ONCE if number == 0 else 1
            if not can_hold((1 + num_loads) * self.backend.row_bytes(length + GRID + 2)):
                continue
            made: list[dict[Component, Payload]] = []
            try:
                for _ in range(num_loads):
                    made += [self._load(length, steps)]
                self._spill(made, steps)
                if number == 0:
                    self._restore(length, made[0], steps)
            finally:
                for payload in (payload for payloads in made for payload in payloads.values()):
                    payload.release()

    def _load(self, num_tokens: int, steps: Iterator[int]) -> dict[Component, Payload]:
        spec, buffers = self.backend.spec, self.tier_io.buffers
        lengths = {
            Component.ATTENTION: num_tokens,
            Component.WINDOW: min(num_tokens, spec.window),
        }
        loads, claimed = [], []
        try:
            for component in spec.components:
                length = lengths.get(component, 1)
                specs = self.backend.payload_arrays(component, length)
                ends = [*accumulate((one.nbytes for one in specs), initial=0)]
                buffer = buffers.claim(ends[-1])
                claimed.append(buffer)
                buffer[: ends[-1]] = 0
                arrays = tuple(buffer[start:end] for start, end in pairwise(ends))
                loads.append(Load(component, length, arrays))
            result = self._launch(StepPlan(next(steps), load=tuple(loads)))
        finally:
            for buffer in claimed:
                buffers.release(buffer)
        return dict(zip(spec.components, result.loaded, strict=True))

    def _spill(self, made: Sequence[dict[Component, Payload]], steps: Iterator[int]) -> None:
        """All at once: each waits in pinned memory of its own."""
        spills = [Spill(kind, (payload,)) for one in made for kind, payload in one.items()]
        result = self._launch(StepPlan(next(steps), spill=tuple(spills)))
        try:
            for spilled in result.spilled:
                spilled.arrays()
        finally:
            for spilled in result.spilled:
                spilled.release()

    def _restore(
        self, length: int, payloads: dict[Component, Payload], steps: Iterator[int]
    ) -> None:
        """A prompt that is restored whole, where hidden vectors are kept, and one that goes on."""
        for num_more in (0, GRID) if Component.HIDDEN in payloads else (GRID,):
            given = {kind: (payload,) for kind, payload in payloads.items()}
            if num_more:
                given.pop(Component.HIDDEN, None)
            restore = Restore(length, given)
            prompt = np.zeros(length + num_more, dtype=np.int32)
            greedy = SamplingParams(temperature=0.0)
            row = PrefillRow(SLOT, length, prompt[length:], samples=True, restore=restore)
            admit = (Admit(SLOT, greedy, (), prompt, seed=SLOT),)
            try:
                self._launch(StepPlan(next(steps), admit=admit, prefill=(row,)))
                self._launch(StepPlan(next(steps), decode=(DecodeRow(SLOT, len(prompt)),)))
            finally:
                self._launch(StepPlan(next(steps), retire=(Retire(SLOT),)))

    def _launch(self, plan: StepPlan) -> StepResult:
        pending = self.backend.launch(plan)
        try:
            return pending.wait()
        except Exception:
            pending.discard()
            raise
