"""What stands around attention and recurrences in each kind of layer: products, norms, gates,
convolutions, rotation.

Of latent attention a token is kept as one small vector that all heads share:

    cell   [ latent, normed | key, rotated ]      rank + rotated channels
    key of a head     [ up_k latent | rotated ]    value of a head   up_v latent

A head's query may be brought to the latents (`absorb`), so that no key is made of them; or keys and
values may be made of them (`expand`), which is less work where there are many queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.torch.models.parts import Linear, Mlp, Norm, Rope
from pippin.backends.torch.shapes import (
    AttentionShape,
    ConvShape,
    DeltaShape,
    LatentShape,
    MambaShape,
)


class Projected(NamedTuple):
    q: torch.Tensor  # [n, heads, channels]
    k: torch.Tensor  # [n, kv heads, channels]
    v: torch.Tensor
    gate: torch.Tensor | None  # [n, heads * channels]


@dataclass(frozen=True)
class Scoring:
    """What tokens see, and how much of it."""

    scale: float
    window: int = 0  # tokens that one sees, itself included; 0: all before it
    softcap: float = 0.0  # 0: there is none
    sinks: torch.Tensor | None = None  # float32 [heads]


@dataclass(frozen=True)
class AttentionLayer:
    shape: AttentionShape
    qkv: Linear  # rows: queries, gates if there are any, keys, values
    out: Linear
    rope: Rope
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: torch.Tensor | None = None  # float32 [heads]

    @property
    def scoring(self) -> Scoring:
        shape = self.shape
        return Scoring(shape.scale, shape.window, shape.softcap, self.sinks)

    @property
    def head_norms(self) -> tuple[Norm, Norm] | None:
        """Those that kernels take: of each head, with one weight for all of them."""
        norms = self.q_norm, self.k_norm
        if self.shape.qk_norm != "head" or norms[0] is None or norms[1] is None:
            return None
        return None if norms[0].centred or norms[0].weight.dim() > 1 else (norms[0], norms[1])

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projected:
        """x [n, hidden]"""
        q, gate, k, v = self._split(self.normed(self.qkv(x)))
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in (q, k, v))
        if (norms := self.head_norms) is not None:
            q, k = norms[0](q), norms[1](k)
        q, k = self.rope.rotate(q, positions), self.rope.rotate(k, positions)
        return Projected(q, k, v, gate if self.shape.gated else None)

    def normed(self, qkv: torch.Tensor) -> torch.Tensor:
        """With norms that kernels do not take."""
        if self.q_norm is None or self.k_norm is None or self.head_norms is not None:
            return qkv
        q, gate, k, v = self._split(qkv)
        if self.shape.qk_norm == "head":
            q, k = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in (q, k))
        q, k = self.q_norm(q), self.k_norm(k)
        return torch.cat([q.flatten(1), gate, k.flatten(1), v], dim=-1)

    def gate_of(self, qkv: torch.Tensor) -> torch.Tensor | None:
        return self._split(qkv)[1] if self.shape.gated else None

    def _split(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        shape = self.shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return list(qkv.split([q_size, q_size * shape.gated, kv_size, kv_size], dim=-1))

    def gated(self, attended: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """attended [n, heads, channels], to what the last product reads."""
        y = attended.flatten(1)
        return y if gate is None else y * torch.sigmoid(gate)

    def finish(self, attended: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        return self.out(self.gated(attended, gate))


@dataclass(frozen=True)
class LatentLayer:
    shape: LatentShape
    project: Linear  # rows: queries, or what they are made of | latent | key to rotate
    query_norm: Norm | None  # where queries are made in two steps
    query_up: Linear | None
    latent_norm: Norm
    up_k: torch.Tensor  # [heads, channels of a key that are not rotated, rank]
    up_v: torch.Tensor  # [heads, channels of a value, rank]
    rope: Rope
    out: Linear

    def placed(
        self, projected: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [n, heads, key channels], the rotated ones last, and cells [n, channels]."""
        shape = self.shape
        first = projected.shape[-1] - shape.rank - shape.rope.dim
        q, latent, key = projected.split([first, shape.rank, shape.rope.dim], dim=-1)
        if self.query_norm is not None and self.query_up is not None:
            q = self.query_up(self.query_norm(q))
        q = q.unflatten(-1, (shape.num_heads, -1))
        plain, turned = q.split([shape.plain_dim, shape.rope.dim], dim=-1)
        q = torch.cat([plain, self.rope.rotate(turned, positions)], dim=-1)
        key = self.rope.rotate(key[:, None], positions)[:, 0]
        return q, torch.cat([self.latent_norm(latent), key], dim=-1)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """[n, heads, key channels] to [heads, n, channels of a cell]."""
        plain, turned = q.transpose(0, 1).split([self.shape.plain_dim, self.shape.rope.dim], dim=-1)
        return torch.cat([plain @ self.up_k, turned], dim=-1)

    def values_of(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of latents [heads, n, rank] to values' [n, heads, value channels]."""
        return (attended @ self.up_v.mT).transpose(0, 1)

    def expand(self, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [heads, cells, key channels] and values of cells [cells, channels]."""
        latent, key = cells.split([self.shape.rank, self.shape.rope.dim], dim=-1)
        turned = key.expand(self.shape.num_heads, *key.shape)
        return torch.cat([latent @ self.up_k.mT, turned], dim=-1), latent @ self.up_v.mT


class Inputs(NamedTuple):
    """float32, what the recurrence reads. Queries and keys of norm 1, queries scaled."""

    q: torch.Tensor  # [n, key heads, k_dim]
    k: torch.Tensor
    v: torch.Tensor  # [n, value heads, v_dim]
    log_gate: torch.Tensor  # [n, value heads]
    beta: torch.Tensor


@dataclass(frozen=True)
class DeltaLayer:
    shape: DeltaShape
    project: Linear  # rows: queries, keys, values | z | b | a
    taps: torch.Tensor  # [num_taps, channels], the newest last
    decay: torch.Tensor  # float32 [value heads]: -exp(A_log)
    dt_bias: torch.Tensor  # float32 [value heads]
    norm: Norm  # of a head's values
    out: Linear
    conv_bias: torch.Tensor | None = None  # [channels]

    def split(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """[n, rows] to the convolution's inputs, z and the gates' inputs."""
        heads = self.shape.num_v_heads
        sizes = [self.shape.num_channels, heads * self.shape.v_dim, 2 * heads]
        return list(projected.split(sizes, dim=-1))

    def inputs(self, convolved: torch.Tensor, gates: torch.Tensor) -> Inputs:
        """convolved [n, channels]: the convolution's sums, before silu; gates: b | a."""
        shape = self.shape
        b, a = gates.chunk(2, dim=-1)
        mixed = F.silu(convolved.float())
        k_size = shape.num_k_heads * shape.k_dim
        q, k, v = mixed.split([k_size, k_size, shape.num_v_heads * shape.v_dim], dim=-1)
        q, k = (_unit(x.unflatten(-1, (shape.num_k_heads, shape.k_dim))) for x in (q, k))
        log_gate = self.decay * F.softplus(a.float() + self.dt_bias)
        v = v.unflatten(-1, (shape.num_v_heads, shape.v_dim))
        return Inputs(q * shape.k_dim**-0.5, k, v, log_gate, torch.sigmoid(b.float()))

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """y, float32 [n, value heads, v_dim]; z [n, value heads * v_dim]"""
        gate = F.silu(z.float()).unflatten(-1, (self.shape.num_v_heads, self.shape.v_dim))
        return self.out((self.norm(y) * gate).to(z.dtype).flatten(1))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


class MambaInputs(NamedTuple):
    """float32, what the recurrence reads."""

    x: torch.Tensor  # [n, heads, head_dim]
    b: torch.Tensor  # [n, groups, state_dim]
    c: torch.Tensor
    dt: torch.Tensor  # [n, heads]
    log_gate: torch.Tensor  # [n, heads]


@dataclass(frozen=True)
class MambaLayer:
    shape: MambaShape
    project: Linear  # rows: x, B, C | z | dt
    taps: torch.Tensor  # [num_taps, channels], the newest last
    conv_bias: torch.Tensor | None  # [channels]
    decay: torch.Tensor  # float32 [heads]: -exp(A_log)
    dt_bias: torch.Tensor  # float32 [heads]
    skip: torch.Tensor  # float32 [heads]: D
    norm: Norm  # of each group's channels
    out: Linear

    def split(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """[n, rows] to the convolution's inputs, z and the time steps' inputs."""
        shape = self.shape
        return list(projected.split([shape.num_channels, shape.inner, shape.num_heads], dim=-1))

    def inputs(self, convolved: torch.Tensor, gates: torch.Tensor) -> MambaInputs:
        """convolved [n, channels]: the convolution's sums, before silu; gates [n, heads]: dt."""
        shape = self.shape
        groups = shape.num_groups * shape.state_dim
        x, b, c = F.silu(convolved.float()).split([shape.inner, groups, groups], dim=-1)
        x = x.unflatten(-1, (shape.num_heads, shape.head_dim))
        b, c = (part.unflatten(-1, (shape.num_groups, shape.state_dim)) for part in (b, c))
        dt = F.softplus(gates.float() + self.dt_bias).clamp(shape.least_dt, shape.most_dt)
        return MambaInputs(x, b, c, dt, self.decay * dt)

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """y, float32 [n, heads, head_dim]; z [n, heads * head_dim]"""
        return self.out(self.normed(y.flatten(1) * F.silu(z.float())).to(z.dtype))

    def normed(self, gated: torch.Tensor) -> torch.Tensor:
        """[n, heads * head_dim]"""
        groups = gated.unflatten(-1, (self.shape.num_groups, -1))
        normed = F.rms_norm(groups, (groups.shape[-1],), eps=self.norm.eps)
        return normed.flatten(1) * self.norm.weight


@dataclass(frozen=True)
class ConvLayer:
    shape: ConvShape
    project: Linear  # rows: B, C, x
    taps: torch.Tensor  # [num_taps, channels], the newest last
    conv_bias: torch.Tensor | None  # [channels]
    out: Linear

    def split(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """[n, rows] to the convolution's inputs, what its sums are multiplied with, and no
        gates."""
        b, c, x = projected.chunk(3, dim=-1)
        return [b * x, c, projected[:, :0]]

    def finish(self, convolved: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return self.out(convolved * c)


@dataclass(frozen=True)
class MtpHead:
    fc: Linear  # [hidden, 2 * hidden]: of an embedding and a hidden vector
    embed_norm: Norm
    hidden_norm: Norm
    input_norm: Norm
    mixer: AttentionLayer
    mlp_norm: Norm
    mlp: Mlp
    norm: Norm

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device
