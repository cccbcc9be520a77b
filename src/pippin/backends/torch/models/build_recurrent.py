"""Weights of a checkpoint to recurrent layers: rows of products in our order."""

from __future__ import annotations

from typing import Protocol

import torch

from pippin.backends.torch.models.decoder import RecurrentLayer
from pippin.backends.torch.models.mixers import ConvLayer, DeltaLayer, MambaLayer
from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.shapes import ConvShape, DeltaShape, MambaShape, RecurrentShape


class WeightSource(Protocol):
    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        """In the served type; `exact`: float32."""
        ...

    def dense(self, name: str, *, exact: bool = False) -> torch.Tensor:
        """Of a product, unpacked; `name` without `.weight`."""
        ...

    def linear(
        self, *names: str, biased: bool = False, orders: tuple[torch.Tensor, ...] = ()
    ) -> Linear:
        """Products of one input, one below the other. `orders`: of the first ones' rows."""
        ...


def build_recurrent(
    source: WeightSource, name: str, shape: RecurrentShape, eps: float
) -> RecurrentLayer:
    """`name`: of the layer's weights begins so."""
    match shape:
        case DeltaShape():
            return _delta(source, f"{name}linear_attn.", shape, eps)
        case ConvShape():
            return _conv(source, f"{name}conv.", shape)
        case MambaShape():
            return _mamba(source, f"{name}mamba.", shape)


def _delta(source: WeightSource, name: str, shape: DeltaShape, eps: float) -> DeltaLayer:
    if shape.interleaved:
        names = (f"{name}in_proj_{part}" for part in ("qkvz", "ba"))
        project = source.linear(*names, orders=_heads_apart(shape))
    else:
        project = source.linear(*(f"{name}in_proj_{part}" for part in ("qkv", "z", "b", "a")))
    return DeltaLayer(
        shape=shape,
        project=project,
        taps=_taps(source, f"{name}conv1d"),
        decay=-source.take(f"{name}A_log", exact=True).exp(),
        dt_bias=source.take(f"{name}dt_bias", exact=True),
        norm=Norm(source.take(f"{name}norm.weight", exact=True), eps),
        out=source.linear(f"{name}out_proj"),
    )


def _conv(source: WeightSource, name: str, shape: ConvShape) -> ConvLayer:
    return ConvLayer(
        shape=shape,
        project=source.linear(f"{name}in_proj", biased=shape.bias),
        taps=_taps(source, f"{name}conv"),
        conv_bias=source.take(f"{name}conv.bias") if shape.bias else None,
        out=source.linear(f"{name}out_proj", biased=shape.bias),
    )


def _mamba(source: WeightSource, name: str, shape: MambaShape) -> MambaLayer:
    return MambaLayer(
        shape=shape,
        project=source.linear(f"{name}in_proj", biased=shape.bias, orders=(_z_behind(shape),)),
        taps=_taps(source, f"{name}conv1d"),
        conv_bias=source.take(f"{name}conv1d.bias") if shape.conv_bias else None,
        decay=-source.take(f"{name}A_log", exact=True).exp(),
        dt_bias=source.take(f"{name}dt_bias", exact=True),
        skip=source.take(f"{name}D", exact=True),
        norm=Norm(source.take(f"{name}norm.weight", exact=True), shape.eps),
        out=source.linear(f"{name}out_proj", biased=shape.bias),
    )


def _taps(source: WeightSource, name: str) -> torch.Tensor:
    return source.take(f"{name}.weight").flatten(1).T.contiguous()


def _z_behind(shape: MambaShape) -> torch.Tensor:
    """Stored as z, x, B, C, dt; here z is behind what is convolved."""
    sizes = [shape.inner, shape.num_channels, shape.num_heads]
    z, mixed, dt = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([mixed, z, dt])


def _heads_apart(shape: DeltaShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored key head by key head as q, k, values, z and as b, a; here part by part."""
    per_key = shape.num_v_heads // shape.num_k_heads
    v_rows = per_key * shape.v_dim

    def apart(sizes: list[int]) -> torch.Tensor:
        rows = torch.arange(shape.num_k_heads * sum(sizes)).unflatten(0, (shape.num_k_heads, -1))
        return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])

    return apart([shape.k_dim, shape.k_dim, v_rows, v_rows]), apart([per_key, per_key])
