"""A depthwise causal Conv1d as shifted multiply-adds, for CPUs; knows no model.

mlx's own takes the general road on a CPU; a kernel of four taps is four passes over the input.
"""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.convolution import Conv1d

from pippin.backends.mlx.taps import record_conv_input


def depthwise_conv1d(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    """x [B, T + K - 1, C], weight [C, K, 1], bias [C] -> [B, T, C]."""
    channels, num_taps, _ = weight.shape
    taps = mx.contiguous(weight.reshape(channels, num_taps).T)
    num_out = x.shape[1] - num_taps + 1
    if num_out == 1:
        y = (x * taps).sum(axis=1, keepdims=True)
    else:
        y = x[:, :num_out] * taps[0]
        for tap in range(1, num_taps):
            y = y + x[:, tap : tap + num_out] * taps[tap]
    return y if bias is None else y + bias


class ShiftConv1d(Conv1d):
    """An `nn.Conv1d` made over in place; see `use_shift_conv1d`."""

    def __call__(self, x: mx.array) -> mx.array:
        record_conv_input(x)
        return depthwise_conv1d(x, self.weight, self.get("bias"))


class TappedConv1d(Conv1d):
    """mlx's own convolution, with its input recorded; for GPUs."""

    def __call__(self, x: mx.array) -> mx.array:
        record_conv_input(x)
        y: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
        return y


def is_depthwise(conv: Conv1d) -> bool:
    """One channel a group, unit steps, no padding of its own: what recurrent layers use."""
    out_channels, _, channels_per_group = conv.weight.shape
    depthwise = channels_per_group == 1 and conv.groups == out_channels
    return bool(depthwise and conv.stride == 1 and conv.padding == 0 and conv.dilation == 1)


def use_shift_conv1d(conv: Conv1d) -> bool:
    """Make `conv` a `ShiftConv1d` if it is depthwise with unit steps; say whether it was done."""
    if is_depthwise(conv):
        conv.__class__ = ShiftConv1d
        return True
    return False
