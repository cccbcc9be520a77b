"""Prefill attention in blocks of queries against mlx's own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.mlx.cpu.attention import QUERIES, attend

LENS = [(1, 1), (QUERIES, QUERIES), (QUERIES + 1, QUERIES + 1), (3 * QUERIES + 5, 400)]


@pytest.mark.parametrize(("num_queries", "num_keys"), LENS)
@pytest.mark.parametrize("kind", ["causal", "none", "bool", "per head"])
def test_blocks_of_queries_equal_the_whole(kind: str, num_queries: int, num_keys: int) -> None:
    q = mx.random.normal((2, 6, num_queries, 16))
    k, v = (mx.random.normal((2, 2, num_keys, 16)) for _ in range(2))
    allowed = mx.random.uniform(shape=(2, 1, num_queries, num_keys)) < 0.7
    allowed[..., 0] = True  # nobody sees nothing
    per_head = mx.random.normal((2, 6, num_queries, num_keys))
    mask = {"causal": "causal", "none": None, "bool": allowed, "per head": per_head}[kind]
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
    np.testing.assert_allclose(np.array(attend(q, k, v, 0.25, mask)), np.array(want), atol=1e-5)
