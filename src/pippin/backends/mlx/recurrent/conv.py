"""A depthwise causal Conv1d as shifted multiply-adds; knows no model."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx.nn.layers.convolution import Conv1d

from pippin.backends.mlx.recurrent.taps import record_conv_input


def depthwise_conv1d(
    x: mx.array, taps: Sequence[mx.array], bias: mx.array | None = None
) -> mx.array:
    """x [B, T + K - 1, C], K taps [C], bias [C] -> [B, T, C]."""
    num_out = x.shape[1] - len(taps) + 1
    shifted = [x[:, start : start + num_out] for start in range(len(taps))]
    y = _weighted_sum(shifted, list(taps))
    return y if bias is None else y + bias


@mx.compile
def _weighted_sum(arrays: list[mx.array], weights: list[mx.array]) -> mx.array:
    """In one pass over memory."""
    y = arrays[0] * weights[0]
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        y = y + array * weight
    return y


class ShiftConv1d(Conv1d):
    """Any tokens on CPUs, where mlx's own is slow; one token on GPUs, to be fused with the rest."""

    def __call__(self, x: mx.array) -> mx.array:
        record_conv_input(x)
        one_token = x.shape[1] == len(self._each_tap)
        if one_token or self._on_cpu:
            return depthwise_conv1d(x, self._each_tap, self.get("bias"))
        y: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
        return y


def is_depthwise(conv: Conv1d) -> bool:
    """One channel a group, unit steps, no padding of its own: what recurrent layers use."""
    out_channels, _, channels_per_group = conv.weight.shape
    depthwise = channels_per_group == 1 and conv.groups == out_channels
    return bool(depthwise and conv.stride == 1 and conv.padding == 0 and conv.dilation == 1)


def use_shift_conv1d(conv: Conv1d, *, cpu: bool) -> None:
    """Make a depthwise `conv` over in place."""
    taps = conv.weight[:, :, 0].T
    conv._taps = mx.contiguous(taps)  # not a parameter: its name begins with _
    conv._each_tap = [mx.contiguous(tap) for tap in taps]
    mx.eval(conv._taps, conv._each_tap)  # or every compiled step would copy them again
    conv._on_cpu = cpu
    conv.__class__ = ShiftConv1d
