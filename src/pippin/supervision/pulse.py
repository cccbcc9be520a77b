"""Whether an engine hangs, told by its signs of life. Knows no clock and no channel.

A thread of the engine gives a sign every half second, whatever the loop does: silence means that
the process is frozen, and soon. The sign says how long the loop's turn has taken so far, and that
can honestly be long: kernels that are built for the first time, or a long prompt on a slow machine.
"""

from __future__ import annotations


class Pulse:
    def __init__(self, *, silence_limit: float, step_limit: float) -> None:
        self._silence_limit = silence_limit
        self._step_limit = step_limit
        self._turn: float | None = None  # seconds; None: it has not begun, loading may take long
        self._silence = 0.0  # seconds

    def heard(self, turn_seconds: float) -> None:
        """A sign of life."""
        self._turn = turn_seconds
        self._silence = 0.0

    def pass_time(self, seconds: float) -> None:
        """Time in which a sign would have been heard.

        A process that was held up itself must not count that time: signs wait in its socket.
        """
        if self._turn is not None:
            self._silence += seconds

    @property
    def complaint(self) -> str | None:
        """Why the engine counts as hung; None while it does not."""
        if self._silence >= self._silence_limit:
            return f"the engine hangs: it gave no sign of life for {self._silence:.0f} s"
        if self._turn is not None and self._turn >= self._step_limit:
            return f"the engine hangs: one step has taken {self._turn:.0f} s so far"
        return None
