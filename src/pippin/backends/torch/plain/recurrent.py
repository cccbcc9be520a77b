"""What recurrent layers do behind their convolution, in plain operations and float32: tokens in
blocks of 64, or one token a row.

One token of the gated delta rule (S is [k_dim, v_dim], g the gate, b = beta) and of Mamba-2 (S is
[state_dim, head_dim], dt its time step, g = exp(dt A)):

    S <- g S;   S <- S + k (b (v - S^T k))^T;   y = S^T q
    S <- g S + B (dt x)^T;                      y = S^T C + D x

A block that starts from S does the same as a few products. With D[t,s] the product of the gates
s+1..t, d[t] that from the block's start, and L = tril(b D (K K^T), -1):

    U = (I + L)^-1 (b V - b d K S)      what each token adds
    Y = d Q S + tril(D (Q K^T)) U;      S' = d_end S + (D_end K)^T U

    Y = d (C S) + tril(D (C B^T)) (dt X) + D X;     S' = d_end S + B^T (D_end dt X)

All but S is done for every block of every row at once; triangular systems are solved by
substitution, which stays exact on runs of one repeated token. Heads of a group of Mamba-2 share B
and C: products with them are one for the group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.torch.models.decoder import RecurrentLayer
from pippin.backends.torch.models.mixers import ConvLayer, Inputs, MambaInputs, MambaLayer
from pippin.types import GRID


class Blocks:
    """Where the blocks of packed rows lie. Rows of any lengths, each in blocks from its start."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        num_tokens = sum(lengths)
        self.counts = [-(-length // GRID) for length in lengths]
        self.firsts = np.cumsum([0, *self.counts])[:-1].tolist()
        starts = np.cumsum([0, *lengths])[:-1]
        index = np.full((sum(self.counts), GRID), num_tokens, dtype=np.int64)  # padding
        places = np.zeros(num_tokens, dtype=np.int64)
        for start, length, first in zip(starts.tolist(), lengths, self.firsts, strict=True):
            tokens = np.arange(start, start + length)
            index.reshape(-1)[first * GRID : first * GRID + length] = tokens
            places[tokens] = first * GRID + np.arange(length)
        self._index = torch.from_numpy(index).to(device)
        self._places = torch.from_numpy(places).to(device)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, ...] to [blocks, heads, 64, ...], zeros behind a row's end."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[self._index].transpose(1, 2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(0, 1)[self._places]


def decays_between(decays: torch.Tensor) -> torch.Tensor:
    """Of sums of gates' logarithms from a block's start [.., 64]: at (t, s <= t) the product of the
    gates s+1..t, else 0."""
    size = decays.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=decays.device)
    between = decays[..., :, None] - decays[..., None, :]
    return between.masked_fill(~ones.tril(), -torch.inf).exp()


def recur_blocks(
    mixer: RecurrentLayer,
    convolved: torch.Tensor,  # [tokens, channels]
    gates: torch.Tensor,  # [tokens, gates' inputs]
    blocks: Blocks,
    states: torch.Tensor,  # float32 [rows, heads, k_dim, v_dim]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `finish` reads of each token, and the state after each block [blocks, ...]."""
    if isinstance(mixer, ConvLayer):
        return convolved, states.new_empty(sum(blocks.counts), *states.shape[1:])
    if isinstance(mixer, MambaLayer):
        return mamba_blocks(mixer.inputs(convolved, gates), mixer.skip, blocks, states)
    return gated_delta_blocks(mixer.inputs(convolved, gates), blocks, states)


def recur_step(
    mixer: RecurrentLayer,
    convolved: torch.Tensor,  # [rows, channels]
    gates: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: the same, and the states after it."""
    if isinstance(mixer, ConvLayer):
        return convolved, states
    if isinstance(mixer, MambaLayer):
        return mamba_step(mixer.inputs(convolved, gates), mixer.skip, states)
    return gated_delta_step(mixer.inputs(convolved, gates), states)


def convolve_step(mixer: RecurrentLayer, source: torch.Tensor) -> torch.Tensor:
    """One token of each row: source [rows, num_taps, channels], the newest input last."""
    convolved = (source * mixer.taps).sum(dim=1)
    return convolved if mixer.conv_bias is None else convolved + mixer.conv_bias


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
