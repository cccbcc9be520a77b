"""Amounts of memory, and durations, as people write and read them."""

from __future__ import annotations

import math
import re
from typing import Any

from pippin.errors import ConfigError

MAX_PARTS = 1000
MEMORY_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(name: str, text: str) -> int:
    """Bytes alone ("20GB", "500000000")."""
    try:
        amount = parse_memory(text)
    except ConfigError:
        amount = 0.0
    if isinstance(amount, float):
        raise ConfigError(f'{name} must be an amount such as "20GB", got {text!r}')
    return amount


def parse_memory(text: str) -> int | float:
    """Bytes ("6GB", "500000000") as an int, a fraction ("0.7") as a float."""
    number = text.strip().upper().rstrip("KMGTB")
    unit = text.strip().upper()[len(number) :]
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit == "" and 0.0 < value <= 1.0:
        return value
    if unit not in MEMORY_UNITS or value <= 0.0:
        raise ConfigError(
            f'memory must be an amount such as "6GB" or a fraction such as "0.7", got {text!r}'
        )
    return int(value * MEMORY_UNITS[unit])


def split_amount(text: str) -> tuple[str, int]:
    """An amount, and by how many it is divided: "6GB/2"."""
    amount, slash, parts = text.partition("/")
    if slash and not (parts.isdecimal() and 1 <= int(parts) <= MAX_PARTS):
        raise ConfigError(
            f'memory can be divided by a number from 1 to {MAX_PARTS}, as "6GB/2", got {text!r}'
        )
    return amount, int(parts) if slash else 1


def budget_of(memory: str, total_bytes: int, default_share: float) -> int:
    """What `--memory` allows on a device of so many bytes."""
    amount, num_parts = split_amount(memory)
    part = default_share if amount == "auto" else parse_memory(amount)
    return (int(part * total_bytes) if isinstance(part, float) else part) // num_parts


def show_bytes(nbytes: int) -> str:
    """For people: "6.2 GB"."""
    if nbytes < 1000:
        return f"{nbytes} bytes"
    unit = _unit_of(nbytes)
    return f"{nbytes / MEMORY_UNITS[unit]:.1f} {unit}"


def option_bytes(nbytes: int) -> str:
    """As the value of an option, rounded up: "6.3GB" is at least `nbytes`."""
    unit = _unit_of(nbytes)
    return f"{math.ceil(nbytes / MEMORY_UNITS[unit] * 10) / 10:g}{unit}"


def _unit_of(nbytes: int) -> str:
    """The largest one that `nbytes` has at least one of; KB for less."""
    return next((u for u in ("TB", "GB", "MB") if nbytes >= MEMORY_UNITS[u]), "KB")


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
