"""What decoder layers are made of besides mixing tokens: norms, products, feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.torch.config import ExpertShape


@dataclass(frozen=True)
class Linear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Norm:
    weight: torch.Tensor  # [n], what is multiplied with: an offset has been added
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).mul_(self.weight).to(x.dtype)


@dataclass(frozen=True)
class DenseMlp:
    gate_up: Linear  # [2 * intermediate, hidden]
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@dataclass(frozen=True)
class ExpertMlp:
    """Each token goes to the experts that its router weighs most, and perhaps to a shared one."""

    shape: ExpertShape
    router: Linear
    gate_up: torch.Tensor  # [experts, 2 * intermediate, hidden]
    down: torch.Tensor  # [experts, hidden, intermediate]
    shared: DenseMlp | None = None
    shared_gate: Linear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.run(x, *self.route(x))
        if self.shared is not None and self.shared_gate is not None:
            y = y + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return y

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in x's type, and experts, int64: [n, num_chosen] each."""
        shares = torch.softmax(self.router(x), dim=-1, dtype=torch.float32)
        weights, chosen = shares.topk(self.shape.num_chosen, dim=-1)
        if self.shape.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def run(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Expert by expert; asks which were chosen, so the host waits for the device.

        The sum over a token's experts is in the order of its choices, without atomics.
        """
        y = x.new_zeros(*chosen.shape, x.shape[-1])
        for expert in chosen.unique().tolist():
            rows, places = torch.nonzero(chosen == expert, as_tuple=True)
            gate, up = F.linear(x[rows], self.gate_up[expert]).chunk(2, dim=-1)
            y[rows, places] = F.linear(F.silu(gate) * up, self.down[expert])
        return (y * weights[..., None]).sum(dim=1)


Mlp = DenseMlp | ExpertMlp
