"""What decoder layers are made of besides mixing tokens: norms, products, feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.torch.models.packed import AnyWeight, Weight, times
from pippin.backends.torch.shapes import Activation, ExpertShape

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
