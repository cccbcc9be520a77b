"""Which of several replicas a client asks for. Knows no engine."""

from __future__ import annotations

from pippin.errors import RequestError


def check_replica(number: int, count: int) -> None:
    if not 0 <= number < count:
        numbers = "0" if count == 1 else f"0 to {count - 1}"
        raise RequestError(f"replica is {number}: use {numbers}", param="replica")
