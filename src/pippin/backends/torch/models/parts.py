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
        weights, chosen = self.route(x)
        run = self._by_groups if x.is_cuda else self._one_by_one
        y = run(x, weights, chosen)
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

    def _one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Asks which experts were chosen, so the host waits for the device: for CPUs."""
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, places = torch.nonzero(chosen == expert, as_tuple=True)
            gate, up = F.linear(x[rows], self.gate_up[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, self.down[expert])
            y.index_add_(0, rows, out * weights[rows, places, None])
        return y

    def _by_groups(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Tokens sorted by expert and one grouped product; the host learns nothing."""
        order = chosen.flatten().argsort(stable=True)
        counts = torch.zeros(self.shape.num_experts, dtype=torch.int32, device=x.device)
        counts.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int32))
        ends = counts.cumsum(0).to(torch.int32)
        rows = order // self.shape.num_chosen
        gate, up = F.grouped_mm(x[rows], self.gate_up.mT, offs=ends).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=ends)
        out = out * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, rows, out)


Mlp = DenseMlp | ExpertMlp
