"""Norms and rotations of queries and keys that a decode step leaves to its attention kernel.

A model calls `mx.fast.rms_norm` and `mx.fast.rope` on its queries and on its keys: four launches a
layer. In a step whose kernel computes these itself, the norm gives back what it was given and the
rotation a stand-in, and the kernel does what is left. Whether a model passes these on untouched is
tried at load (trial_run.py); a step in which it does not is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.rope_utils import YarnRoPE

from pippin.backends.mlx.cpu import operations as drop_ins

HeadNorms = Mapping[int, mx.array]  # weights of norms of queries and keys, by their id

CHANGED = "a layer does not pass on what rms_norm and rope returned as it is"


@dataclass(frozen=True, eq=False)
class Norm:
    weight: mx.array
    eps: float


@dataclass(frozen=True, eq=False)
class Rope:
    """What is left to be done to queries or keys [rows, heads, 1, D]."""

    dims: int
    traditional: bool
    base: float | None
    scale: float
    freqs: mx.array | None
    norm: Norm | None
    gain: float = 1.0  # of all channels, before they are rotated

    def apply(self, x: mx.array, positions: mx.array) -> mx.array:
        if self.norm is not None:
            x = drop_ins.rms_norm(x, self.norm.weight.astype(x.dtype), self.norm.eps)
        if self.gain != 1.0:
            x = x * self.gain
        return drop_ins.rope(
            *(x, self.dims),
            traditional=self.traditional,
            base=self.base,
            scale=self.scale,
            offset=positions,
            freqs=self.freqs,
        )

    def angles(self) -> mx.array:
        """float32 [dims / 2]: by how much each pair of channels is rotated, for each position."""
        if self.freqs is not None:
            return self.scale / self.freqs.astype(mx.float32)
        assert self.base is not None, "mlx asks for a base or frequencies"
        return self.scale * drop_ins.frequencies(self.dims, self.base)


@dataclass(frozen=True, eq=False)
class Unrotated:
    """Stands for queries or keys that are yet to be normed and rotated.

    A model does no more with them than to scale them, and beside latents to multiply queries by
    keys, for which its cache has given it something else (views.py); anything else on it is an
    error.
    """

    x: mx.array
    rope: Rope

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def __mul__(self, scale: object) -> Unrotated:
        if not isinstance(scale, float):  # one for each row
            raise TypeError(CHANGED)
        return Unrotated(self.x, replace(self.rope, gain=self.rope.gain * scale))

    def __matmul__(self, keys: mx.array) -> Unrotated:
        return self


def what_is_left(queries: Any, keys: Any) -> tuple[mx.array, mx.array, tuple[Rope, Rope] | None]:
    """The arrays, and what is left to be done to them: both or neither were rotated."""
    if not isinstance(queries, Unrotated) and not isinstance(keys, Unrotated):
        return queries, keys, None
    both = isinstance(queries, Unrotated) and isinstance(keys, Unrotated)
    if not both or _rotation(queries.rope) != _rotation(keys.rope):
        raise TypeError(CHANGED)
    return queries.x, keys.x, (queries.rope, keys.rope)


def _rotation(rope: Rope) -> object:
    has_norm = rope.norm is not None
    return rope.dims, rope.traditional, rope.base, rope.scale, id(rope.freqs), has_norm


class DeferredRopes:
    """Of one step."""

    def __init__(self, positions: mx.array, norms: HeadNorms) -> None:
        self._positions = positions  # the very array that caches have as their offset
        self._norm_weights = norms
        self._norms: deque[tuple[mx.array, Norm]] = deque()  # whose results rope is yet to be given

    def takes_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> bool:
        if id(weight) not in self._norm_weights or x.ndim != 4:
            return False
        self._norms.append((x, Norm(self._norm_weights[id(weight)], eps)))
        return True

    def rope(self, x: mx.array, dims: int, offset: Any, **options: Any) -> Unrotated | None:
        """What the model is given in place of what it asked for; None if it must be computed."""
        if offset is not self._positions or x.ndim != 4 or x.shape[2] != 1:
            return None
        norm = None
        if self._norms:  # of queries, then of keys, as they are rotated; or of one after the other
            normed, norm = self._norms.popleft()
            rows, heads, _, dim = x.shape
            if normed.shape not in (x.shape, (rows, 1, heads, dim)):
                raise TypeError(CHANGED)
        return Unrotated(x, Rope(dims, norm=norm, **options))

    def check_all_are_rotated(self) -> None:
        if self._norms:
            raise TypeError(CHANGED)


_deferred: ContextVar[DeferredRopes | None] = ContextVar("pippin_deferred_ropes", default=None)


@contextmanager
def deferring(ropes: DeferredRopes | None) -> Iterator[None]:
    token = _deferred.set(ropes)
    try:
        yield
        if ropes is not None:
            ropes.check_all_are_rotated()
    finally:
        _deferred.reset(token)


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **options: Any) -> mx.array:
    """Drop-in for `mx.fast.rms_norm`."""
    ropes = _deferred.get()
    if ropes is not None and not options and ropes.takes_norm(x, weight, eps):
        return x
    return drop_ins.rms_norm(x, weight, eps, **options)


def rope(x: mx.array, dims: int, *, freqs: mx.array | None = None, **options: Any) -> Any:
    """Drop-in for `mx.fast.rope`."""
    ropes = _deferred.get()
    left = None if ropes is None else ropes.rope(x, dims, freqs=freqs, **options)
    return left if left is not None else drop_ins.rope(x, dims, freqs=freqs, **options)


class GainRope(YarnRoPE):
    """mlx-lm's, made over in place by `use_gain_rope`: it multiplies before it rotates."""

    def __call__(
        self, x: mx.array, offset: Any = 0, scale: float = 1.0, inverse: bool = False
    ) -> Any:
        ropes, whole = _deferred.get(), x.shape[-1] == self.dims and not inverse
        if ropes is not None and whole:
            options = {"traditional": self.traditional, "base": None, "freqs": self._freqs}
            options |= {"scale": scale, "gain": self.mscale}
            if (left := ropes.rope(x, self.dims, offset, **options)) is not None:
                return left
        y: mx.array = super().__call__(x, offset, scale, inverse)  # type: ignore[no-untyped-call]
        return y


def use_gain_rope(model: Module) -> None:
    for _, part in model.named_modules():
        if type(part) is YarnRoPE:
            part.__class__ = GainRope


def head_norms(model: Module) -> dict[int, mx.array]:
    """The weights of norms beside a rotation: a layer's attention has both."""
    found: dict[int, mx.array] = {}
    for _, part in model.named_modules():
        if "rope" not in part.children() and "rotary_emb" not in part.children():
            continue
        for child in part.children().values():
            weight = getattr(child, "_whole_weight", None)
            if weight is None and isinstance(child, Module) and hasattr(child, "eps"):
                weight = child.get("weight")
            if isinstance(weight, mx.array) and weight.ndim == 1:
                found[id(weight)] = weight
    return found
