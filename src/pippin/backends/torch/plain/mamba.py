"""The Mamba-2 recurrence in plain torch operations: many tokens in blocks, or one token a row.

One token does (S is [state_dim, head_dim], dt its time step, g = exp(dt A)):

    S <- g S + B (dt x)^T;   y = S^T C + D x

A block of 64 tokens that starts from S, with G[t,s] the product of the gates s+1..t and g1 the one
from the block's start:

    Y = g1 (C S) + tril(G (C B^T)) (dt X) + D X;   S' = g_end S + B^T (G_end dt X)

Heads of a group share B and C: products with them are one for the group. float32 throughout.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.models.mamba_layer import MambaInputs
from pippin.backends.torch.plain.blocks import Blocks, decays_between


def mamba_blocks(
    inputs: MambaInputs,
    skip: torch.Tensor,  # float32 [heads]: D
    blocks: Blocks,
    states: torch.Tensor,  # float32 [rows, heads, state_dim, head_dim]
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [tokens, heads, head_dim], and the state after each block [blocks, ...]."""
    num_groups = inputs.b.shape[1]
    b, c = blocks.split(inputs.b), blocks.split(inputs.c)
    decays = blocks.split(inputs.log_gate).cumsum(-1)
    between = decays_between(decays)
    added = blocks.split(inputs.x * inputs.dt[..., None])
    per_group = (num_groups, -1)
    attention = between.unflatten(1, per_group) * (c @ b.mT)[:, :, None]
    y = attention.flatten(1, 2) @ added
    # [blocks, groups, 64, heads of a group * head_dim], and the same of states
    at_end = _heads_last(added * between[..., -1, :, None], num_groups)
    gains = _heads_first(b.mT @ at_end, states.shape[-1])
    from_start = decays.exp()[..., None]
    after = torch.empty_like(gains)
    for row, (first, count) in enumerate(zip(blocks.firsts, blocks.counts, strict=True)):
        state = states[row]
        for n in range(first, first + count):
            read = c[n] @ _heads_last(state[None], num_groups)[0]
            y[n] += from_start[n] * _heads_first(read[None], state.shape[-1])[0]
            state = torch.addcmul(gains[n], state, from_start[n, :, -1:], out=after[n])
    return blocks.join(y) + inputs.x * skip[:, None], after


def mamba_step(
    inputs: MambaInputs, skip: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: y [rows, heads, head_dim] and the states after it."""
    num_groups = inputs.b.shape[1]
    b, c = (part[:, :, None, :, None] for part in (inputs.b, inputs.c))
    added = (inputs.x * inputs.dt[..., None])[..., None, :].unflatten(1, (num_groups, -1))
    held = (states * inputs.log_gate.exp()[..., None, None]).unflatten(1, (num_groups, -1))
    after = torch.addcmul(held, b, added)
    y = (after * c).sum(dim=-2).flatten(1, 2)
    return y + inputs.x * skip[:, None], after.flatten(1, 2)


def _heads_last(x: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[n, heads, rows, channels] to [n, groups, rows, heads of a group * channels]."""
    return x.unflatten(1, (num_groups, -1)).transpose(2, 3).flatten(3)


def _heads_first(x: torch.Tensor, num_channels: int) -> torch.Tensor:
    """The other way."""
    return x.unflatten(3, (-1, num_channels)).transpose(2, 3).flatten(1, 2)
