"""Numbers as transformers writes them into a config.json."""

from __future__ import annotations

from typing import Any


def read_number(value: Any) -> float:
    """Infinity is written as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)
