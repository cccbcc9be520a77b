"""A download's bytes, counted in the place of the hub's progress bars. Prints nothing."""

from __future__ import annotations

from threading import Lock
from typing import Any


class ByteCount:
    """The most bytes that any bar of one download has counted: files are counted as they arrive
    from the network and as they are written, and what was received may be compressed."""

    def __init__(self) -> None:
        self._bars: list[_Bar] = []

    @property
    def completed(self) -> int:
        return int(max((bar.n for bar in self._bars), default=0))

    def bar(self, *_: Any, unit: str = "it", **options: Any) -> _Bar:
        """For the hub's `tqdm_class`."""
        bar = _Bar(options.get("total"), options.get("initial") or 0)
        if unit == "B":
            self._bars.append(bar)
        return bar


class _Bar:
    """What the hub calls of a tqdm."""

    def __init__(self, total: int | None, n: int) -> None:
        self.total, self.n = total, n
        self.format_dict: dict[str, Any] = {}
        self._lock = Lock()  # several threads download

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def update(self, n: float | None = 1) -> None:
        with self._lock:
            self.n += int(n or 0)

    def refresh(self) -> None:
        pass

    def close(self) -> None:
        pass

    def set_description(self, *_: Any, **__: Any) -> None:
        pass

    set_description_str = set_postfix_str = set_description
