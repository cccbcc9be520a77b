"""Shifted multiply-adds against mlx's own depthwise convolution."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from cases import cases
from pippin.backends.mlx.recurrent.conv import (
    ShiftConv1d,
    is_depthwise,
    use_shift_conv1d,
)


@cases("cpu", [True, False], ids=["as on CPUs", "as on GPUs"])
@cases("bias", [False, True])
@cases("num_taps", [2, 3, 4])
@cases(("batch", "num_tokens"), [(1, 1), (5, 1), (1, 70), (3, 17)])
def test_the_drop_in_agrees_with_mlx(
    batch: int, num_tokens: int, num_taps: int, bias: bool, cpu: bool
) -> None:
    channels = 24
    conv = nn.Conv1d(channels, channels, num_taps, groups=channels, bias=bias)
    if bias:
        conv.bias = mx.random.normal((channels,), key=mx.random.key(1))
    x = mx.random.normal((batch, num_tokens + num_taps - 1, channels), key=mx.random.key(2))
    want = np.array(conv(x))
    assert is_depthwise(conv)
    use_shift_conv1d(conv, cpu=cpu)
    assert type(conv) is ShiftConv1d
    np.testing.assert_allclose(np.array(conv(x)), want, atol=1e-6, rtol=1e-5)


def test_parameters_and_types_survive_the_swap() -> None:
    conv = nn.Conv1d(8, 8, 4, groups=8)
    conv.set_dtype(mx.bfloat16)
    names = sorted(conv.parameters())
    use_shift_conv1d(conv, cpu=True)
    assert sorted(conv.parameters()) == names
    assert conv(mx.ones((2, 9, 8), dtype=mx.bfloat16)).dtype == mx.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 1},
        {"groups": 4},
        {"groups": 8, "stride": 2},
        {"groups": 8, "padding": 3},
        {"groups": 8, "dilation": 2},
    ],
)
def test_other_convolutions_are_not_taken_for_depthwise(options: dict[str, int]) -> None:
    assert not is_depthwise(nn.Conv1d(8, 8, 4, **options))
