"""Amounts of memory as people write them. Knows no option."""

from __future__ import annotations

from pippin.errors import ConfigError

MEMORY_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(name: str, text: str) -> int:
    """Bytes alone ("20GB", "500000000")."""
    try:
        amount = parse_memory(text)
    except ConfigError:
        amount = 0.0
    if isinstance(amount, float):
        raise ConfigError(f'{name} must be bytes, like "20GB", got {text!r}')
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
        raise ConfigError(f'memory must be like "6GB" or a fraction like "0.7", got {text!r}')
    return int(value * MEMORY_UNITS[unit])
