"""Kernels of Mamba-2 over prompts' chunks against plain operations: on a GPU, or interpreted."""

from __future__ import annotations

from typing import cast

import pytest

pytest.importorskip("interpreted")

import torch

from pippin.backends.torch.device import find_device
from pippin.backends.torch.kernels.recurrent.mamba_blocks import mamba_blocks
from pippin.backends.torch.kernels.rows import gated_norm
from pippin.backends.torch.models.mamba_layer import MambaInputs, MambaLayer
from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.plain.blocks import Blocks
from pippin.backends.torch.plain.mamba import mamba_blocks as plain_blocks
from pippin.backends.torch.shapes import MambaShape
from pippin.backends.torch.step.chunk_inputs import BlockInputs, RecurrentInputs

DEVICE = find_device()
NO_PRODUCT = cast(Linear, None)  # none is run here
LENGTHS = (70, 3)  # of rows whose states are in slabs 1 and 2
NUM_TOKENS = 80  # the rest is padding
# By block: position, first token, tokens, the slab that its state goes to; the last is of no row.
POSITIONS, STARTS, COUNTS, SLABS = (0, 64, 5, 0), (0, 64, 70, 0), (64, 6, 3, 0), (3, 1, 4, 0)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_layer(num_groups: int) -> MambaLayer:
    shape = MambaShape(4, 16, num_groups, state_dim=16, num_taps=4, least_dt=0.01, most_dt=2.0)
    return MambaLayer(
        shape,
        project=NO_PRODUCT,
        taps=torch.zeros(0),
        conv_bias=None,
        decay=-2.0 * torch.rand(4, device=DEVICE),
        dt_bias=torch.randn(4, device=DEVICE),
        skip=torch.randn(4, device=DEVICE),
        norm=Norm(torch.randn(shape.inner, device=DEVICE), 1e-5),
        out=NO_PRODUCT,
    )


# An interpreter multiplies no bfloat16.
@pytest.mark.parametrize(
    ("dtype", "num_groups", "near"),
    [(torch.float32, 2, 1e-5), (torch.float32, 4, 1e-5), (torch.float16, 1, 2e-3)],
)
def test_blocks_are_run_from_state_to_state(
    dtype: torch.dtype, num_groups: int, near: float
) -> None:
    """Two rows, one of two blocks whose first state is kept as well; heads that share B and C."""
    torch.manual_seed(0)
    layer = make_layer(num_groups)
    shape, num_tokens = layer.shape, sum(LENGTHS)
    mixed = torch.randn(NUM_TOKENS, shape.num_channels, device=DEVICE).to(dtype)
    gates = torch.randn(NUM_TOKENS, shape.num_heads + 3, device=DEVICE)[:, : shape.num_heads]
    state = torch.randn(6, *shape.state_parts, device=DEVICE)
    groups = shape.num_groups * shape.state_dim
    parts = mixed[:num_tokens].float().split([shape.inner, groups, groups], dim=-1)
    x, b, c = (
        part.unflatten(1, (count, -1))
        for part, count in zip(parts, (shape.num_heads, num_groups, num_groups), strict=True)
    )
    dt = torch.nn.functional.softplus(gates[:num_tokens] + layer.dt_bias)
    dt = dt.clamp(shape.least_dt, shape.most_dt)
    plain = MambaInputs(x, b, c, dt, layer.decay * dt)
    y, after = plain_blocks(plain, layer.skip, Blocks(LENGTHS, DEVICE), state[[1, 2]].clone())
    words = ((1, 1, 2, 0), POSITIONS, STARTS, COUNTS, (0, 0, 70, 0), (1, 1, 2, 0), SLABS)
    blocks = BlockInputs(*(integers(*line) for line in words))
    rows = (integers(1, 2, 0, 0), integers(0, 2, 0, 0), integers(2, 1, 0, 0))
    before = state.clone()
    found = mamba_blocks(mixed, gates, layer, state, RecurrentInputs(integers(), *rows, blocks))
    torch.testing.assert_close(found[:num_tokens].float(), y, rtol=near, atol=10 * near)
    assert not found[num_tokens:].any()
    torch.testing.assert_close(state[[3, 1, 4]], after, rtol=near, atol=10 * near)
    assert torch.equal(state[[0, 2, 5]], before[[0, 2, 5]])


@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_gate_comes_before_the_norm_of_a_group(num_groups: int) -> None:
    torch.manual_seed(0)
    layer = make_layer(num_groups)
    y, z = (torch.randn(3, layer.shape.inner, device=DEVICE) for _ in range(2))
    expected = layer.normed(y * torch.nn.functional.silu(z))
    found = gated_norm(y.unflatten(1, (num_groups, -1)), z, layer.norm, gate_first=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
