"""Products of a few rows by tensor cores: on a GPU, or on a CPU by the interpreter of Triton."""

from __future__ import annotations

import pytest

pytest.importorskip("interpreted")

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.torch.device import find_device
from pippin.backends.torch.kernels.few_rows import MOST_ROWS
from pippin.backends.torch.kernels.products import product
from pippin.backends.torch.models.parts import Linear, Norm

DEVICE = find_device()


def noise(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [2, 5, MOST_ROWS])
@pytest.mark.parametrize("size", [48, 1024, 1200])
@pytest.mark.parametrize("kind", ["norm", "residual", "swiglu", "bias"])
def test_products_have_norms_sums_and_gates_inside(num_rows: int, size: int, kind: str) -> None:
    torch.manual_seed(num_rows * size)
    num_out = 40
    x, weight = noise(num_rows, size), noise(2 * num_out if kind == "swiglu" else num_out, size)
    bias = noise(num_out) if kind == "bias" else None
    norm = Norm(noise(size, dtype=torch.float32), 1e-6) if kind in ("norm", "swiglu") else None
    residual = noise(num_rows, num_out) if kind == "residual" else None
    linear = Linear(weight / size**0.5, bias)
    found = product(x, linear, norm=norm, residual=residual, swiglu=kind == "swiglu")
    normed = x.float() if norm is None else norm(x.float())
    expected = F.linear(normed, linear.weight.float(), None if bias is None else bias.float())
    if kind == "swiglu":
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    if residual is not None:
        expected = expected + residual.float()
    torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=2e-2)
