"""What decoder layers are made of besides mixing tokens: norms, products, feed-forward layers; and
rotary positions, one table of cosines and sines for all that a model may see."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.torch.models.packed import AnyWeight, Weight, times
from pippin.backends.torch.shapes import Activation, ExpertShape, RopeShape


@dataclass(frozen=True)
class Rope:
    cos: torch.Tensor  # float32 [max_len, dim / 2]
    sin: torch.Tensor

    @classmethod
    def of(cls, shape: RopeShape, max_len: int, device: torch.device) -> Rope:
        frequencies, scale = inverse_frequencies(shape)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
        return cls((angles.cos() * scale).to(device), (angles.sin() * scale).to(device))

    @property
    def dim(self) -> int:
        return 2 * int(self.cos.shape[-1])

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [n, heads, head_dim]: the first `dim` channels of each head, in two halves."""
        if not self.dim:
            return x
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        first, second, rest = x.split(
            [self.dim // 2, self.dim // 2, x.shape[-1] - self.dim], dim=-1
        )
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def inverse_frequencies(shape: RopeShape) -> tuple[torch.Tensor, float]:
    """float32 [dim / 2], and what cosines and sines are multiplied with."""
    exponents = torch.arange(0, shape.dim, 2, dtype=torch.float32) / shape.dim
    plain = 1.0 / shape.theta**exponents
    options = shape.options
    match shape.kind:
        case "linear":
            return plain / float(options["factor"]), 1.0
        case "llama3":
            return _llama3(plain, options), 1.0
        case "yarn":
            return _yarn(plain, shape)
    return plain, 1.0


def _llama3(plain: torch.Tensor, options: dict[str, float]) -> torch.Tensor:
    """Long waves are stretched, short ones are not, those between in proportion."""
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - smooth) * plain / options["factor"] + smooth * plain


def _yarn(plain: torch.Tensor, shape: RopeShape) -> tuple[torch.Tensor, float]:
    options = shape.options
    trained = options["original_max_position_embeddings"]
    factor = float(options.get("factor") or shape.max_len / trained)

    def dim_of(rotations: float) -> float:
        turns = trained / (rotations * 2 * math.pi)
        return shape.dim * math.log(turns) / (2 * math.log(shape.theta))

    low = dim_of(options.get("beta_fast") or 32)
    high = dim_of(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.dim - 1)
    span = max(high - low, 0.001)
    stretched = ((torch.arange(shape.dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    frequencies = plain / factor * stretched + plain * (1.0 - stretched)
    return frequencies, float(options.get("attention_factor") or _yarn_scale(factor, options))


def _yarn_scale(factor: float, options: dict[str, float]) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        return scale(options["mscale"]) / scale(options["mscale_all_dim"])
    return scale(1.0)


SILU = Activation()

Times = Callable[[torch.Tensor, AnyWeight, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Linear:
    weight: AnyWeight  # [out, in]
    bias: torch.Tensor | None = None
    times: Times = times  # in plain operations, or by a kernel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.times(x, self.weight, self.bias)


@dataclass(frozen=True)
class Head(Linear):
    """To logits."""

    scale: float = 1.0
    softcap: float = 0.0  # 0: there is none

    @property
    def is_plain(self) -> bool:
        return self.scale == 1.0 and not self.softcap

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = super().__call__(x)
        if self.scale != 1.0:
            y = y * self.scale
        return torch.tanh(y / self.softcap) * self.softcap if self.softcap else y


@dataclass(frozen=True)
class Norm:
    weight: torch.Tensor  # [n] or [heads, n], what is multiplied with: an offset has been added
    eps: float
    centred: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = F.layer_norm if self.centred else F.rms_norm
        return norm(x.float(), (x.shape[-1],), eps=self.eps).mul_(self.weight).to(x.dtype)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[n, 2 * size], gate and up, to [n, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    match activation.kind:
        case "silu":
            return F.silu(gate) * up
        case "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return (up + 1) * gate * torch.sigmoid(gate * activation.alpha)


@dataclass(frozen=True)
class DenseMlp:
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear
    activation: Activation = SILU

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gated(self.gate_up(x), self.activation))


@dataclass(frozen=True)
class SquaredMlp:
    """Without a gate: the squares of what is above zero (relu2)."""

    up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)).square())


@dataclass(frozen=True)
class ExpertMlp:
    """Each token goes to the experts that its router weighs most, and perhaps to a shared one."""

    shape: ExpertShape
    router: Linear
    gate_up: Weight  # [experts, 2 * intermediate, hidden]; without gates half of it
    down: Weight  # [experts, hidden, intermediate]
    shared: DenseMlp | SquaredMlp | None = None
    shared_gate: Linear | None = None
    choice_bias: torch.Tensor | None = None  # float32 [experts]: helps to choose, and weighs not
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * intermediate]
    down_bias: torch.Tensor | None = None  # [experts, hidden]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.run(x, *self.route(x))
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (
            shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared
        )

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in x's type, and experts, int64: [n, num_chosen] each."""
        shape = self.shape
        if shape.scoring == "sigmoid":
            shares = torch.sigmoid(self.router(x.float()))  # its weight is float32
        else:
            shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        chosen = self._preferred(shares).topk(shape.num_chosen, dim=-1).indices
        weights = shares.gather(1, chosen)
        if shape.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return (weights * shape.scale).to(x.dtype), chosen

    def _preferred(self, shares: torch.Tensor) -> torch.Tensor:
        """By which experts are chosen: [n, experts]."""
        shape = self.shape
        if self.choice_bias is not None:
            shares = shares + self.choice_bias
        if shape.num_groups == 1:
            return shares
        groups = shares.unflatten(-1, (shape.num_groups, -1))
        best = groups.topk(shape.group_best, dim=-1).values.sum(dim=-1)
        best = best.topk(shape.num_groups_chosen).indices
        others = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        return groups.masked_fill(others[..., None], -torch.inf).flatten(1)

    def run(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Expert by expert; asks which were chosen, so the host waits for the device.

        The sum over a token's experts is in the order of its choices, without atomics.
        """
        y = x.new_zeros(*chosen.shape, x.shape[-1])
        for expert in chosen.unique().tolist():
            rows, places = torch.nonzero(chosen == expert, as_tuple=True)
            up = Linear(self.gate_up[expert], _of(self.gate_up_bias, expert))
            down = Linear(self.down[expert], _of(self.down_bias, expert))
            if self.shape.gated:
                y[rows, places] = DenseMlp(up, down, self.shape.activation)(x[rows])
            else:
                y[rows, places] = SquaredMlp(up, down)(x[rows])
        return (y * weights[..., None]).sum(dim=1)


def _of(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]


Mlp = DenseMlp | ExpertMlp | SquaredMlp
