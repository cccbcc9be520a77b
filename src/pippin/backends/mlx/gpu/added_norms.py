"""What a layer adds to its input, and the norm that follows, as one Metal kernel.

    h = x + attention(norm(x))   |   one launch for `+` and the norm of the next line
    h + mlp(norm(h))             |   likewise, with the first norm of the next layer

In a decode step layers are given a stand-in for their input. A sum with it is not computed before
something asks for it: a norm asks for the sum and for what it makes of it at once. Whether the
layers of a model can be given one is tried at load (trial_run.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import gemma3_text

from pippin.backends.mlx.attention import head_ropes
from pippin.backends.mlx.gpu.kernels import constants, run_kernel

FEW_THREADS, MANY_THREADS = 256, 1024  # of a row; not measured on Apple GPUs
CHANNELS_OF_FEW = 4096  # that are a row at the most, where it has few threads

_clip_residual: Callable[..., mx.array] = gemma3_text.clip_residual

SOURCE = """
    constexpr int PER_THREAD = (Size + Threads - 1) / Threads;
    const int me = thread_position_in_threadgroup.x;
    const size_t row = static_cast<size_t>(threadgroup_position_in_grid.y) * Size;
    float own[PER_THREAD];
    float squares = 0.0f;
    _Pragma("unroll")
    for (int i = 0; i < PER_THREAD; ++i) {
      const int c = i * Threads + me;
      own[i] = 0.0f;
      if (c < Size) {
        const T both = static_cast<T>(
            static_cast<float>(x[row + c]) + static_cast<float>(y[row + c]));
        sum[row + c] = both;
        own[i] = static_cast<float>(both);
        squares += own[i] * own[i];
      }
    }
    squares = simd_sum(squares);
    threadgroup float parts[Threads / 32];
    if (me % 32 == 0) parts[me / 32] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    squares = 0.0f;
    for (int n = 0; n < Threads / 32; ++n) squares += parts[n];
    const float scale = metal::precise::rsqrt(squares / Size + eps[0]);
    _Pragma("unroll")
    for (int i = 0; i < PER_THREAD; ++i) {
      const int c = i * Threads + me;
      if (c >= Size) continue;
      const T scaled = static_cast<T>(own[i] * scale);
      normed[row + c] = static_cast<T>(
          static_cast<float>(weight[c]) * static_cast<float>(scaled));
    }
"""


def add_and_norm(
    x: mx.array, y: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """x + y, and its norm: arrays [..., n] of one type."""
    size = x.shape[-1]
    threads = FEW_THREADS if size <= CHANNELS_OF_FEW else MANY_THREADS
    total, normed = run_kernel(
        *("pippin_add_and_norm", SOURCE),
        {"x": x, "y": y, "weight": weight, "eps": constants(eps)},
        {"sum": (x.shape, x.dtype), "normed": (x.shape, x.dtype)},
        {"T": x.dtype, "Size": size, "Threads": threads},
        grid=(threads, x.size // size, 1),
        threads=threads,
    )
    return total, normed


class PendingSum:
    """Stands for x + y, or for x alone."""

    def __init__(self, x: mx.array, y: mx.array | None = None) -> None:
        self._x, self._y = x, y

    @property
    def array(self) -> mx.array:
        if self._y is not None:
            self._x, self._y = self._x + self._y, None
        return self._x

    @property
    def shape(self) -> tuple[int, ...]:
        return self._x.shape

    @property
    def dtype(self) -> mx.Dtype:
        return self._x.dtype

    def __add__(self, other: Any) -> PendingSum:
        return PendingSum(self.array, other.array if isinstance(other, PendingSum) else other)

    def normed(self, weight: mx.array | None, eps: float) -> mx.array:
        x, y = self._x, self._y
        alike = y is not None and weight is not None and y.shape == x.shape and y.dtype == x.dtype
        if y is None or weight is None or not alike or weight.ndim != 1:
            return head_ropes.rms_norm(self.array, weight, eps)
        (self._x, normed), self._y = add_and_norm(x, y, weight, eps), None
        return normed


_adding: ContextVar[bool] = ContextVar("pippin_pending_sums", default=False)


@contextmanager
def adding_later(*, active: bool) -> Iterator[None]:
    token = _adding.set(active)
    try:
        yield
    finally:
        _adding.reset(token)


def rms_norm(x: Any, weight: mx.array | None, eps: float, **options: Any) -> mx.array:
    """Drop-in for `mx.fast.rms_norm`."""
    if isinstance(x, PendingSum):
        return x.normed(weight, eps)
    return head_ropes.rms_norm(x, weight, eps, **options)


def clip_residual(x: Any, y: mx.array) -> Any:
    """Drop-in for Gemma 3's sum, which has limits in float16."""
    if not isinstance(x, PendingSum):
        return _clip_residual(x, y)
    return _clip_residual(x.array, y) if x.dtype == mx.float16 else x + y


def use_pending_sums(model: Module) -> None:
    """Make the model's layers over in place: inside `adding_later` they get stand-ins."""
    for layer in getattr(model, "layers", None) or []:
        if isinstance(layer, Module) and not hasattr(type(layer), "_adds_later"):
            _make_over(layer)


def _make_over(layer: Module) -> None:
    cls = type(layer)

    def call(self: Any, x: Any, *args: Any, **options: Any) -> Any:
        stands_in = _adding.get() and isinstance(x, mx.array)
        return cls.__call__(self, PendingSum(x) if stands_in else x, *args, **options)

    members = {"__call__": call, "_adds_later": True, "__module__": cls.__module__}
    layer.__class__ = type(cls.__name__, (cls,), members)
