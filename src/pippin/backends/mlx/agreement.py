"""Whether a kernel computes on this device what plain operations do. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from pippin.backends.fallbacks import note_fallback
from pippin.backends.mlx.layout import ROUNDING


def off_by(found: mx.array, expected: mx.array) -> mx.array:
    """How far the worst number is off, of the largest one that is expected."""
    plain = expected.astype(mx.float32)
    largest = mx.maximum(mx.abs(plain).max(), 1e-6)
    return mx.abs(found.astype(mx.float32) - plain).max() / largest


def agrees(without: str, errors: Callable[[], list[mx.array]]) -> bool:
    """Whether none of the `errors` is more than rounding. Else why not is noted, with `without`:
    what becomes of it."""
    try:
        worst = float(mx.stack(errors()).max())
    except Exception as failure:  # whatever a kernel can do on a machine that we have never seen
        note_fallback(without, failure, failure)
        return False
    if not worst <= ROUNDING:
        note_fallback(without, f"the kernel is off by {worst:.1g} here")
    return worst <= ROUNDING
