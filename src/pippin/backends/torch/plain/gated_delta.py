"""The gated delta rule in plain torch operations: many tokens in blocks, or one token a row.

One token does (S is [k_dim, v_dim], g the gate, b = beta):

    S <- g S;   S <- S + k (b (v - S^T k))^T;   y = S^T q

A block of 64 tokens that starts from S does the same as a few products. With D[t,s] the product of
the gates s+1..t, d[t] that from the block's start, and L = tril(b D (K K^T), -1):

    U = (I + L)^-1 (b V - b d K S)      what each token adds
    Y = d Q S + tril(D (Q K^T)) U
    S' = d_end S + (D_end K)^T U

All but S is done for every block of every row at once; triangular systems are solved by
substitution, which stays exact on runs of one repeated token. float32 throughout.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.models.delta_layer import Inputs
from pippin.backends.torch.plain.blocks import Blocks, decays_between


def gated_delta_blocks(
    inputs: Inputs,
    blocks: Blocks,
    states: torch.Tensor,  # float32 [rows, value heads, k_dim, v_dim]
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [tokens, value heads, v_dim], and the state after each block [blocks, ...]."""
    q, k = (_per_value_head(x, inputs.v.shape[1]) for x in (inputs.q, inputs.k))
    q, k, v = (blocks.split(x) for x in (q, k, inputs.v))
    beta = blocks.split(inputs.beta)[..., None]
    decays = blocks.split(inputs.log_gate).cumsum(-1)
    between = decays_between(decays)
    from_start = decays.exp()[..., None]
    to_end = between[..., -1, :, None]

    system = (beta * between * (k @ k.mT)).tril(-1)
    right = torch.cat([beta * v, beta * from_start * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    writes, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    attention = between * (q @ k.mT)
    queries, keys = q * from_start, (k * to_end).mT
    after = torch.empty(len(q), *states.shape[1:], device=q.device)
    y = torch.empty_like(v)
    for row, (first, count) in enumerate(zip(blocks.firsts, blocks.counts, strict=True)):
        state = states[row]
        for n in range(first, first + count):
            added = torch.baddbmm(writes[n], reads[n], state, alpha=-1.0)
            torch.baddbmm(queries[n] @ state, attention[n], added, out=y[n])
            decayed = state * from_start[n, :, -1:]
            state = torch.baddbmm(decayed, keys[n], added, out=after[n])
    return blocks.join(y), after


def gated_delta_step(inputs: Inputs, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: y [rows, value heads, v_dim] and the states after it."""
    num_heads = inputs.v.shape[1]
    q, k = (_per_value_head(x, num_heads) for x in (inputs.q, inputs.k))
    decayed = states * inputs.log_gate.exp()[..., None, None]
    recalled = (k[..., None, :] @ decayed).squeeze(-2)
    added = (inputs.v - recalled) * inputs.beta[..., None]
    after = decayed + k[..., None] * added[..., None, :]
    return (q[..., None, :] @ after).squeeze(-2), after


def _per_value_head(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Keys and queries [n, key heads, dim], for each of the value heads that share them."""
    shared = num_heads // x.shape[1]
    return x if shared == 1 else x.repeat_interleave(shared, dim=1)
