"""Whether a kernel computes on this device what plain operations do. Knows no kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx

from pippin.backends.mlx.layout import ROUNDING

logger = logging.getLogger(__name__)


def off_by(found: mx.array, expected: mx.array) -> mx.array:
    """How far the worst number is off, of the largest one that is expected."""
    plain = expected.astype(mx.float32)
    largest = mx.maximum(mx.abs(plain).max(), 1e-6)
    return mx.abs(found.astype(mx.float32) - plain).max() / largest


def agrees(without: str, errors: Callable[[], list[mx.array]]) -> bool:
    """Whether none of the `errors` is more than rounding. The log says why not, and `without` what
    becomes of it."""
    try:
        worst = float(mx.stack(errors()).max())
    except Exception as failure:  # whatever a kernel can do on a machine that we have never seen
        logger.warning("%s: %s", without, failure, exc_info=failure)
        return False
    if not worst <= ROUNDING:
        logger.warning("%s: the kernel is off by %.1g here", without, worst)
    return worst <= ROUNDING
