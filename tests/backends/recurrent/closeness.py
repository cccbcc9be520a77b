"""How near a recurrence must come to what is wanted of it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def assert_close(got: mx.array, want: np.ndarray, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest value wanted, or of one where all are smaller."""
    assert got.shape == want.shape
    largest = np.abs(want).max(initial=1.0)
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)), want, rtol=0, atol=tolerance * largest
    )
