"""A depthwise causal Conv1d as shifted multiply-adds; knows no model."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.convolution import Conv1d

from pippin.backends.mlx.recurrent.taps import record_conv_input


class ShiftConv1d(Conv1d):
    """Any tokens on CPUs, where mlx's own is slow; one token on GPUs, to be fused with the rest."""

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T + K - 1, C] -> [B, T, C]"""
        record_conv_input(x)
        num_out = x.shape[1] - len(self._each_tap) + 1
        y: mx.array
        if num_out > 1 and not self._on_cpu:
            y = super().__call__(x)  # type: ignore[no-untyped-call]
            return y
        shifted = [x[:, at : at + num_out] * tap for at, tap in enumerate(self._each_tap)]
        y = sum(shifted[1:], shifted[0])
        return y + self.bias if "bias" in self else y


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
