"""Checks that several sections make of their values. Knows no section."""

from __future__ import annotations

from typing import Any

from pippin.errors import ConfigError


def check_at_least(section: Any, **minimums: int) -> None:
    for name, minimum in minimums.items():
        value = getattr(section, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{name} must be at least {minimum}, got {value}")
