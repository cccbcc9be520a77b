"""Finds stop strings in text that arrives in pieces. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Shows text up to a stop string, holding back whatever might be the beginning of one.

    The stop string that is complete first wins, and of those the longest, so the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop before the first character"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._held = ""
        self.matched: str | None = None

    @property
    def num_held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> str:
        """The text that may now be shown."""
        if self.matched is not None:
            return ""
        text = self._held + text
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.matched = min(hits)
            self._held = ""
            return text[:at]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """No more text will come: what was held back is not a stop string after all."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Characters at the end of `text` with which some stop string begins."""
        for num in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-num:]) for stop in self._stops):
                return num
        return 0
