"""Durations as Ollama's users write them."""

from __future__ import annotations

import math
import re
from typing import Any

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})(ns|us|µs|ms|s|m|h)")
_NUMBER = re.compile(r"\d{1,12}(\.\d{0,9})?")
MAX_CHARS = 64
FOR_EVER = math.inf
IN_WORDS = 'a number of seconds, or a duration such as "5m", "1h30m" or "24h"; negative: for ever'


def parse_duration(value: Any) -> float | None:
    """Seconds; `FOR_EVER` for a negative one; None: it is no duration."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        if math.isnan(value):
            return None
        return FOR_EVER if value < 0 else float(min(value, 1e15))
    if not isinstance(value, str) or len(value) > MAX_CHARS:
        return None
    text = value.strip()
    negative = text.startswith("-")
    text = text.removeprefix("-").removeprefix("+")
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    else:
        parts = list(_PART.finditer(text))
        if not parts or "".join(part[0] for part in parts) != text:
            return None
        seconds = sum(float(part[1]) * _UNITS[part[2]] for part in parts)
    return FOR_EVER if negative else seconds
