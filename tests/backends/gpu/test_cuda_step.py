"""One token of the gated delta rule on an NVIDIA GPU: the kernel against the plain operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.mlx.gpu import cuda_step
from pippin.backends.mlx.recurrent.gated_delta import gated_delta_update

needs_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU")


def arguments(batch: int, k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> list[mx.array]:
    mx.random.seed(0)
    q, k = (mx.random.normal((batch, 1, k_heads, k_dim)) * k_dim**-0.5 for _ in range(2))
    v = mx.random.normal((batch, 1, v_heads, v_dim))
    a, b = (mx.random.normal((batch, 1, v_heads)) * 4 for _ in range(2))
    A_log, dt_bias = (mx.random.normal((v_heads,)) for _ in range(2))  # noqa: N806
    return [q, k, v, a, b, A_log, dt_bias, mx.random.normal((batch, v_heads, v_dim, k_dim))]


@needs_cuda
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
@pytest.mark.parametrize(
    ("batch", "k_heads", "v_heads", "k_dim", "v_dim"),
    [(1, 16, 16, 128, 128), (8, 4, 8, 64, 128), (3, 16, 32, 128, 128)],
)
def test_the_kernel_agrees_with_the_plain_operations(
    batch: int,
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    allow_neg_eigval: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = arguments(batch, k_heads, v_heads, k_dim, v_dim)
    got = gated_delta_update(*args, allow_neg_eigval=allow_neg_eigval)
    monkeypatch.setattr(cuda_step, "takes", lambda *_: False)
    want = gated_delta_update(*args, allow_neg_eigval=allow_neg_eigval)
    for ours, plain in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(plain), atol=2e-6, rtol=2e-6)


def test_without_a_gpu_or_with_other_shapes_the_kernel_declines() -> None:
    _, k, v, a, *_ = arguments(1, 2, 2, 48, 8)  # 48 is no multiple of a warp
    assert not cuda_step.takes(k, v, a)
    if not mx.cuda.is_available():
        _, k, v, a, *_ = arguments(1, 2, 2, 64, 64)
        assert not cuda_step.takes(k, v, a)
