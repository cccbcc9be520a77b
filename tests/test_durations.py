"""Durations as Ollama's clients send them."""

from __future__ import annotations

from typing import Any

from cases import cases
from pippin.amounts import FOR_EVER, parse_duration


@cases(
    ("given", "seconds"),
    [
        (0, 0.0),
        (300, 300.0),
        (1.5, 1.5),
        (-1, FOR_EVER),
        ("0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("500ms", 0.5),
        ("-1s", FOR_EVER),
        ("-1", FOR_EVER),
        (1e400, 1e15),
    ],
)
def test_numbers_and_texts_are_read(given: Any, seconds: float) -> None:
    assert parse_duration(given) == seconds


@cases("given", ["", "soon", "5 m", "m", "1d", True, None, [], {}, "1" * 100])
def test_what_is_no_duration_is_none(given: Any) -> None:
    assert parse_duration(given) is None


def test_not_a_number_is_none() -> None:
    assert parse_duration(float("nan")) is None
