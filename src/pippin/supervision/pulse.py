"""Whether an engine hangs, told by its signs of life. Knows no clock and no channel.

An engine gives a sign every half second, but none while a step runs, and that can honestly take
long: kernels that are built for the first time, or a long prompt on a slow machine. So its sign
says whether a step comes next. An idle engine has nothing else to do: soon, silence means a hang.
"""

from __future__ import annotations

IDLE_LIMIT_SECONDS = 30.0


class Pulse:
    def __init__(self, step_limit_seconds: float) -> None:
        self._step_limit = step_limit_seconds
        self._stepping: bool | None = None  # None: it has not begun; loading may take long
        self._silence = 0.0  # seconds

    def heard(self, *, stepping: bool) -> None:
        """A sign of life; `stepping` if a step comes next."""
        self._stepping = stepping
        self._silence = 0.0

    def pass_time(self, seconds: float) -> None:
        """Time in which a sign would have been heard.

        A process that was held up itself must not count that time: signs wait in its socket.
        """
        if self._stepping is not None:
            self._silence += seconds

    @property
    def complaint(self) -> str | None:
        """Why the engine counts as hung; None while it does not."""
        if self._stepping:
            if self._silence >= self._step_limit:
                return f"the engine hangs: one step has taken {self._silence:.0f} s so far"
        elif self._silence >= min(IDLE_LIMIT_SECONDS, self._step_limit):
            return f"the engine hangs: it gave no sign of life for {self._silence:.0f} s"
        return None
