"""The real engine on the toy model, on a device that takes time: a clock that no machine disturbs.

What a step takes is a function of its rows and prompt tokens. The host takes none; it launches two
steps ahead, as the loop does, and waits for what is not done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from builders import Client, Reply, loop_clock, make_scheduler
from pippin.backends.base import StepPlan, StepResult
from pippin.backends.fake import FakeBackend, FakePending
from pippin.scheduler.loop import Loop
from pippin.scheduler.pace import Pace
from pippin.scheduler.speculation import Speculation


@dataclass(frozen=True)
class Device:
    """seconds = [any row] x (decode + row x rows + draft x drafts)
    + [any prompt] x (forward + token x tokens)"""

    decode: float
    row: float
    forward: float
    token: float
    prefill_tokens: int
    draft: float = 0.0

    def seconds(self, rows: int, tokens: int, drafts: int = 0) -> float:
        decode = (self.decode + self.row * rows + self.draft * drafts) * (rows > 0)
        return decode + (self.forward + self.token * tokens) * (tokens > 0)


# The bundled model on two cores, and a model of 0.8B parameters on a large GPU.
TWO_CORES = Device(decode=0.009, row=0.001, forward=0.015, token=4.2e-4, prefill_tokens=512)
LARGE_GPU = Device(decode=0.004, row=1e-5, forward=0.040, token=1.7e-5, prefill_tokens=8192)


class TimedBackend(FakeBackend):
    def __init__(self, device: Device, **kwargs: Any) -> None:
        super().__init__(num_slots=64, max_len=1 << 16, **kwargs)
        self.costs = device
        self.now = 0.0
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> FakePending:
        pending = super().launch(plan)
        pending.dispatched = self.now
        tokens = sum(len(row.tokens) for row in plan.prefill)
        begins = max(self.now, self._free_at)
        took = self.costs.seconds(len(plan.decode), tokens, plan.num_drafts)
        self._free_at = done_at = begins + took
        finish = pending.wait

        def wait() -> StepResult:
            self.now = max(self.now, done_at)
            return finish()

        pending.wait = wait  # type: ignore[method-assign]
        return pending


@dataclass
class Heard:
    """When one client asked, and when it heard each token."""

    asked: float
    reply: Reply
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.asked

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times)]


Ask = tuple[float, str, Sequence[int], dict[str, Any]]  # when, who, prompt, parameters


def serve(
    device: Device,
    asks: Sequence[Ask],
    *,
    max_gap: float | None = None,
    speculation: Speculation | None = None,
) -> dict[str, Heard]:
    """Run these to the end, with the pace that a server has; what each client heard."""
    max_depth = 0 if speculation is None else speculation.max_depth
    backend = TimedBackend(device, max_depth=max_depth)
    scheduler = make_scheduler(
        backend, num_slots=64, chunk=device.prefill_tokens, speculation=speculation
    )
    limits = {} if max_gap is None else {"max_gap": max_gap}
    scheduler.pace = Pace(device.prefill_tokens, **limits, costs=scheduler.pace.costs)
    client = Client(Loop(scheduler, backend))
    heard: dict[str, Heard] = {}
    left = sorted(asks, key=lambda ask: ask[0])
    with loop_clock(backend):
        while left or not client.loop.idle:
            if client.loop.idle:
                backend.now = max(backend.now, left[0][0])
            while left and left[0][0] <= backend.now:
                at, name, prompt, params = left.pop(0)
                heard[name] = Heard(at, client.submit(prompt, id=name, **params))
            client.step()
            for one in heard.values():
                new = len(one.reply.tokens) - len(one.times)
                one.times += [backend.now] * new
    return heard


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
