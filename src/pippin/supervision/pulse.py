"""Whether an engine hangs, by its heartbeats. Knows no clock and no channel.

A thread of the engine sends a heartbeat every half second, whatever the loop does: without them
the process is frozen. A heartbeat has the duration of the current step so far, which can be long
for good reasons: kernels that are compiled for the first time, or a long prompt on a slow machine.
"""

from __future__ import annotations


class Pulse:
    def __init__(self, *, silence_limit: float, step_limit: float) -> None:
        self._silence_limit = silence_limit
        self._step_limit = step_limit
        self._turn: float | None = None  # seconds; None before the first one: loading may take long
        self._silence = 0.0  # seconds

    def beat(self, turn_seconds: float) -> None:
        """A heartbeat arrived."""
        self._turn = turn_seconds
        self._silence = 0.0

    def pass_time(self, seconds: float) -> None:
        """Time in which a heartbeat would have been received.

        A server that was suspended itself must not count that time: heartbeats wait in its socket.
        """
        if self._turn is not None:
            self._silence += seconds

    @property
    def complaint(self) -> str | None:
        """Why the engine counts as hung; None while it does not."""
        if self._silence >= self._silence_limit:
            return (
                f"the engine hangs: no heartbeat for {self._silence:.0f} s (limit: "
                f"--heartbeat-timeout {self._silence_limit:g})"
            )
        if self._turn is not None and self._turn >= self._step_limit:
            return (
                f"the engine hangs: one step has taken {self._turn:.0f} s so far (limit: "
                f"--engine-timeout {self._step_limit:g})"
            )
        return None
