"""The gated delta rule and Mamba-2 in plain MLX operations, blocked.

One token does (S is [Dv, Dk], g the gate, b = beta):

    S <- g S;   S <- S + b (v - S k) k^T;   y = S q

A block of 64 tokens that starts from S does the same as a few products. With G[t,s] the product
of the gates s+1..t, and T = (I + tril(b G (K K^T), -1))^-1 b:

    U = T V - T (g1 K) S^T       what each token adds, g1 = gates from the block's start
    Y = (g1 Q) S^T + tril(G (Q K^T)) U
    S' = g_end S + U^T (G_end K) = S A + B,   A = g_end - (T g1 K)^T (G_end K)

All but the last line is done for every block and head at once; S' is one product per block.
Decays are running products of gates (`decay_matrix`): no logarithm for a gate of zero to send to
infinity, no difference of large sums.

Mamba-2 (dt is its time step, g = exp(dt A)) is the same but for what that replaces (U = V,
A = g_end), with queries C, keys B and values dt x:

    S <- g S + dt x B^T;   y = S C + D x

A token past its row's length, or masked, has dt = 0: it forgets nothing and adds nothing, so every
row's state is right wherever the row ends.

Where mlx-lm has a Metal kernel, that runs. It gives the state after the last token alone: where
states between tokens are tapped, a call runs in slices, each from the state of the one before it,
in float32: the numbers are those of one call, to the bit, for a few launches a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta as mlx_lm_gated_delta
from mlx_lm.models import ssm as mlx_lm_ssm

from pippin.backends.mlx.device import on_metal
from pippin.backends.mlx.recurrent.taps import ColumnMajor, active_taps, record_block_states

BLOCK_TOKENS = 64
_MIN_BLOCK_TOKENS = 16
_FAINT = 2.0**-36


def block_tokens(num_tokens: int) -> int:
    """Tokens per block: 64, or the least power of two from 16 that holds a short call."""
    block = _MIN_BLOCK_TOKENS
    while block < min(num_tokens, BLOCK_TOKENS):
        block *= 2
    return block


def split_blocks(x: mx.array, num_groups: int, fill: float = 0.0) -> mx.array:
    """[B, T, H, ...] -> contiguous float32 [B, N, G, H / G, C, ...], padded with `fill`."""
    batch, num_tokens, num_heads, *tail = x.shape
    block = block_tokens(num_tokens)
    x = x.astype(mx.float32)
    if num_tokens % block:
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, -num_tokens % block)
        x = mx.pad(x, widths, constant_values=fill)
    x = x.reshape(batch, -1, block, num_groups, num_heads // num_groups, *tail)
    return mx.contiguous(mx.moveaxis(x, 2, 4))


def join_blocks(x: mx.array, num_tokens: int) -> mx.array:
    """[B, N, G, R, C, D] -> [B, T, G * R, D] without the padding."""
    batch, _, groups, repeats, _, dim = x.shape
    joined = x.transpose(0, 1, 4, 2, 3, 5).reshape(batch, -1, groups * repeats, dim)
    return joined[:, :num_tokens]


def decay_matrix(gates: mx.array) -> mx.array:
    """[.., C] gates within 0..1 -> [.., C, C]: at (t, s <= t) the product of gates s+1..t, else 0.

    Running products, not exp of differences of logarithms: a gate of zero is nothing special, a
    small gate early in the block costs no precision later, and `exp` is far dearer on a CPU.
    """
    upper, floor = _triangles(gates.shape[-1])
    # Down column s: ones to the diagonal, then the gates. The floor takes away the ones again.
    return mx.maximum(mx.cumprod(mx.maximum(gates[..., None], upper), axis=-2) - floor, 0.0)


def drop_faint(decay: mx.array) -> mx.array:
    """Decays below 2^-36 become zero: no one can tell, but an x86 core takes some hundred cycles
    for each number under 1e-38 that products of them would make."""
    return mx.maximum(decay - _FAINT, 0.0)


@cache
def _triangles(size: int) -> tuple[mx.array, mx.array]:
    """(ones on and above the diagonal; ones above it and 2^-36 elsewhere)."""
    ones = np.ones((size, size), dtype=np.float32)
    return mx.array(np.triu(ones)), mx.array(
        np.where(np.triu(ones, 1) > 0, 1.0, _FAINT).astype(np.float32)
    )


_BASE = 16
_ROUNDER = 1.5 * 2.0**-11


def unit_lower_inverse(strict: mx.array) -> mx.array:
    """(I - strict)^-1 for `strict` [..., n, n], n a multiple of 16 times a power of two.

    Only entries below the diagonal are read; the rest of `strict` may hold anything finite.
    """
    strict = _drop_faint(strict)
    size = strict.shape[-1]
    if size == _BASE:
        return _invert_base(strict)
    blocks = _invert_base(_block_pairs(strict, _BASE, 1, 0))
    block = _BASE
    while block < size:
        lower = _block_pairs(strict, block, 2, 1)
        lo, hi = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        blocks = stack_lower(lo, _drop_faint(hi @ lower @ lo), hi)
        block *= 2
    return blocks[..., 0, :, :]


def stack_lower(lo: mx.array, lower: mx.array, hi: mx.array) -> mx.array:
    """[[lo, 0], [lower, hi]] over the last two axes."""
    size = lo.shape[-1]
    # Writing into zeros takes half the time of concatenating on a CPU.
    whole = mx.zeros((*lo.shape[:-2], 2 * size, 2 * size), dtype=lo.dtype)
    whole[..., :size, :size] = lo
    whole[..., size:, :size] = lower
    whole[..., size:, size:] = hi
    return whole


def _block_pairs(matrix: mx.array, block: int, stride: int, offset: int) -> mx.array:
    """Blocks (offset, 0), (offset + stride, stride), ... on a new axis before the last two."""
    starts = range(0, matrix.shape[-1], stride * block)
    rows = offset * block
    return mx.stack(
        [matrix[..., i + rows : i + rows + block, i : i + block] for i in starts], axis=-3
    )


def _invert_base(strict: mx.array) -> mx.array:
    """Whole 16 x 16 blocks at once: a mask picks each level's off-diagonal part."""
    eye, levels = _base_constants()
    inverse = eye + strict * levels[0]
    for level in levels[1:]:
        inverse = _drop_faint(mx.addmm(inverse, inverse @ (strict * level), inverse))
    return inverse


def _drop_faint(x: mx.array) -> mx.array:
    """Round to multiples of 2^-34, far below what a sum with entries near one can hold.

    Paths of many small steps would else end under 1e-38, where an x86 core takes some hundred
    cycles per number; GPUs do not mind.
    """
    return x if mx.default_device() == mx.gpu else (x + _ROUNDER) - _ROUNDER


@cache
def _base_constants() -> tuple[mx.array, list[mx.array]]:
    """The identity, and per block size 1, 2, 4, 8 the part below it within twice the size."""
    index = np.arange(_BASE)
    masks = []
    for block in (1, 2, 4, 8):
        row, column = index[:, None] // block, index[None, :] // block
        masks.append((row % 2 == 1) & (row == column + 1))
    return mx.array(np.eye(_BASE, dtype=np.float32)), [
        mx.array(mask.astype(np.float32)) for mask in masks
    ]


SIMD_WIDTH = 32  # mlx-lm's kernels give each lane a whole share of a row of the state

# What some of the tokens read, and the state after them; None: there is no state before them.
Recurrence = Callable[[slice, mx.array | None], tuple[mx.array, mx.array]]


def has_kernel(key_dim: int) -> bool:
    """For states with keys of so many channels: fewer operations than ours, and one launch."""
    return on_metal() and key_dim % SIMD_WIDTH == 0


def run_in_slices(
    recurrence: Recurrence, num_tokens: int, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """All tokens; sliced only inside of `tap_states`."""
    taps = active_taps()
    if taps is None:
        return recurrence(slice(None), state)
    every = range(BLOCK_TOKENS, num_tokens, BLOCK_TOKENS)
    cuts = [cut for cut in (every if taps.wanted is None else taps.wanted) if cut < num_tokens]
    outputs: list[mx.array] = []
    states: dict[int, mx.array] = {}  # by the number of their block
    for start, end in zip([0, *cuts], [*cuts, num_tokens], strict=True):
        y, state = recurrence(slice(start, end), state)
        outputs.append(y)
        states[(end - 1) // BLOCK_TOKENS] = state
    record_block_states(states)
    return mx.concatenate(outputs, axis=1) if cuts else outputs[0], cast(mx.array, state)


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,  # noqa: N803  (mlx-lm's name)
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, mx.array]:
    """Drop-in for `mlx_lm.models.gated_delta.gated_delta_update`, which runs where it has a kernel.

    Masked tokens leave the state alone; their outputs are finite and mean nothing.
    """
    if use_kernel and has_kernel(k.shape[-1]):
        update: Callable[..., tuple[mx.array, mx.array]] = partial(
            mlx_lm_gated_delta.gated_delta_update,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            allow_neg_eigval=allow_neg_eigval,
        )

        def run(tokens: slice, state: mx.array | None) -> tuple[mx.array, mx.array]:
            given = (array[:, tokens] for array in (q, k, v, a, b))
            return update(*given, state=state, mask=None if mask is None else mask[:, tokens])

        return run_in_slices(run, q.shape[1], state)
    if state is None:
        state = mx.zeros((q.shape[0], *v.shape[-2:], q.shape[-1]), dtype=mx.float32)
    beta = mx.sigmoid(b)
    if allow_neg_eigval:
        beta = beta * 2.0
    if lower_bound is None:
        g = mlx_lm_gated_delta.compute_g(A_log, a, dt_bias)
    else:
        g = mlx_lm_gated_delta.compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    if mask is not None:
        # A masked token forgets nothing and writes nothing.
        keep = mask.reshape(*mask.shape, 1)
        g = mx.where(keep if g.ndim == 3 else keep[..., None], g, 1.0)
        beta = mx.where(keep, beta, 0.0)
    if q.shape[1] == 1:
        y, state = gated_delta_step(q, k, v, g, beta, state)
        record_block_states([state])
        return y, state
    y, state, block_states = gated_delta_chunked(q, k, v, g, beta, state)
    record_block_states(ColumnMajor(block_states))
    return y, state


def normalize_qk(
    q: mx.array, k: mx.array, *, inv_scale: float, eps: float
) -> tuple[mx.array, mx.array]:
    """Drop-in for `mlx_lm.models.gated_delta.normalize_qk`, to the bit: the scales are weights of
    the norms, so that no operation of its own multiplies by them."""

    def norm(x: mx.array, scale: float) -> mx.array:
        return mx.fast.rms_norm(x, _filled(x.shape[-1], scale, x.dtype), eps * inv_scale**2)

    return norm(q, inv_scale**2), norm(k, inv_scale)


@cache
def _filled(size: int, value: float, dtype: mx.Dtype) -> mx.array:
    filled = mx.full((size,), value, dtype)
    mx.eval(filled)
    return filled


def gated_delta_step(
    q: mx.array,  # [B, 1, Hk, Dk]
    k: mx.array,  # [B, 1, Hk, Dk]
    v: mx.array,  # [B, 1, Hv, Dv]
    g: mx.array,  # [B, 1, Hv] or [B, 1, Hv, Dk]
    beta: mx.array | None,  # [B, 1, Hv]
    state: mx.array,  # [B, Hv, Dv, Dk]
) -> tuple[mx.array, mx.array]:
    """One token, in as few operations as it takes: each costs more than its arithmetic."""
    batch, _, num_k_heads, k_dim = k.shape
    num_v_heads, v_dim = v.shape[2:]
    # An axis for the value heads that share a key, only where they do: an axis costs time too.
    shared = () if num_k_heads == num_v_heads else (num_v_heads // num_k_heads,)
    heads = (batch, num_k_heads, *shared)
    key = k.astype(mx.float32).reshape(batch, num_k_heads, *(1 for _ in shared), k_dim, 1)
    query = q.astype(mx.float32).reshape(key.shape)
    held = state.reshape(*heads, v_dim, k_dim)
    delta = v.reshape(*heads, v_dim, 1)
    if beta is not None:
        delta = delta - held @ (key * g.reshape(*heads, -1, 1))
        delta = delta * beta.reshape(*heads, 1, 1)
    # Nothing else reads what has decayed, so that addmm may write into it.
    decayed = held * g.reshape(*heads, 1, -1)
    # reshape, not swapaxes: a row that counts as transposed takes a slower product.
    new = mx.addmm(decayed, delta, key.reshape(*key.shape[:-2], 1, k_dim))
    return (new @ query).reshape(v.shape).astype(q.dtype), new.reshape(state.shape)


def gated_delta_chunked(
    q: mx.array,  # [B, T, Hk, Dk]
    k: mx.array,  # [B, T, Hk, Dk]
    v: mx.array,  # [B, T, Hv, Dv]
    g: mx.array,  # [B, T, Hv] or [B, T, Hv, Dk], within 0..1
    beta: mx.array | None,  # [B, T, Hv]
    state: mx.array,  # [B, Hv, Dv, Dk]
) -> tuple[mx.array, mx.array, list[mx.array]]:
    """Many tokens: (y, final state, the state after each block of 64)."""
    batch, num_tokens, num_k_heads, k_dim = k.shape
    v_dim = v.shape[-1]
    q_, k_, v_ = (split_blocks(x, num_k_heads) for x in (q, k, v))
    g_ = split_blocks(g, num_k_heads, fill=1.0)
    inner = (_scalar_gated if g.ndim == 3 else _vector_gated)(q_, k_, g_)
    decay = inner.from_start[..., -1:, :]  # [.., 1, 1 or Dk]: all gates of the block

    # States are passed on transposed, [Dk, Dv]: products with a transposed right side are slower.
    first = state.astype(mx.float32).reshape(batch, num_k_heads, -1, v_dim, k_dim)
    states = [first.swapaxes(-1, -2)]
    if beta is None:
        assert g.ndim == 3, "decays scale values here, of which all channels decay alike"
        gain = k_.swapaxes(-1, -2) @ (v_ * inner.to_end)
        for n in range(gain.shape[1]):
            states.append(gain[:, n] + decay[:, n] * states[-1])
        starts, deltas = mx.stack(states[:-1], axis=1), v_
        held = (q_ @ starts) * inner.from_start
    else:
        beta_ = split_blocks(beta, num_k_heads)
        solve = unit_lower_inverse(inner.coupling * -beta_[..., None]) * beta_[..., None, :]
        writes, reads = solve @ v_, solve @ (k_ * inner.from_start)
        k_out_t = (k_ * inner.to_end).swapaxes(-1, -2)
        carry = mx.addmm(decay * _eye(k_dim), k_out_t, reads, alpha=-1.0)
        gain = k_out_t @ writes
        for n in range(carry.shape[1]):
            states.append(mx.addmm(gain[:, n], carry[:, n], states[-1]))
        starts = mx.stack(states[:-1], axis=1)
        deltas = mx.addmm(writes, reads, starts, alpha=-1.0)
        held = (q_ * inner.from_start) @ starts
    y = mx.addmm(held, inner.attention, deltas)
    block_states = [s.swapaxes(-1, -2).reshape(state.shape) for s in states[1:]]
    return join_blocks(y.astype(q.dtype), num_tokens), block_states[-1], block_states


class _Inner(NamedTuple):
    """What a block's tokens are to each other; leading axes [B, N, Hk, Hv / Hk]."""

    coupling: mx.array  # [.., C, C]  G (K K^T); only below the diagonal it counts
    attention: mx.array  # [.., C, C]  tril(G (Q K^T))
    from_start: mx.array  # [.., C, 1 or Dk]  gates from the block's start
    to_end: mx.array  # [.., C, 1 or Dk]  gates behind the token, to the block's end


def _scalar_gated(q: mx.array, k: mx.array, g: mx.array) -> _Inner:
    decay = decay_matrix(g)
    keys_t = k.swapaxes(-1, -2)
    return _Inner(
        coupling=(k @ keys_t) * decay,
        attention=(q @ keys_t) * decay,
        from_start=drop_faint(mx.cumprod(g, axis=-1))[..., None],
        to_end=decay[..., -1, :, None],
    )


def _vector_gated(q: mx.array, k: mx.array, g: mx.array) -> _Inner:
    """A gate per key channel. Token t sees s through gates s+1..t; at the level where the two lie
    in the two halves of one block these factor at the middle, each factor a product of gates."""
    num_tokens = k.shape[-2]

    def halves(x: mx.array, size: int) -> mx.array:
        return x.reshape(*x.shape[:-2], num_tokens // size, size, x.shape[-1])

    diagonal = (q * k).sum(axis=-1)[..., None, None]
    diagonal = mx.broadcast_to(diagonal, (*g.shape[:-1], 1, 1))
    attention, coupling = diagonal, mx.zeros_like(diagonal)
    size = 1
    while size < num_tokens:
        gates = halves(g, size)
        until = drop_faint(mx.cumprod(gates, axis=-2))
        after = drop_faint(mx.cumprod(gates, axis=-2, reverse=True, inclusive=False))
        keys = halves(k, size)
        keys_t = (keys * after)[..., 0::2, :, :].swapaxes(-1, -2)
        rows_k = (keys * until)[..., 1::2, :, :]
        rows_q = (halves(q, size) * until)[..., 1::2, :, :]
        coupling, attention = (
            stack_lower(x[..., 0::2, :, :], rows @ keys_t, x[..., 1::2, :, :])
            for x, rows in ((coupling, rows_k), (attention, rows_q))
        )
        size *= 2
    return _Inner(
        coupling=coupling[..., 0, :, :],
        attention=attention[..., 0, :, :],
        from_start=drop_faint(mx.cumprod(g, axis=-2)),
        to_end=drop_faint(mx.cumprod(g, axis=-2, reverse=True, inclusive=False)),
    )


@cache
def _eye(size: int) -> mx.array:
    return mx.array(np.eye(size, dtype=np.float32))


def ssm_update(
    hidden_states: mx.array,  # [B, T, H, Dh]
    A_log: mx.array,  # noqa: N803  [H]
    B: mx.array,  # noqa: N803  [B, T, G, Ds]
    C: mx.array,  # noqa: N803  [B, T, G, Ds]
    D: mx.array,  # noqa: N803  [H]
    dt: mx.array,  # [B, T, H]
    dt_bias: mx.array,  # [H]
    state: mx.array | None = None,  # [B, H, Dh, Ds]
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,  # [B, T]
    lengths: mx.array | None = None,  # [B]; at or below zero: the row has already ended
    *,
    use_kernel: bool = True,
) -> tuple[mx.array, mx.array]:
    """Drop-in for `mlx_lm.models.ssm.ssm_update`, whose kernel takes one token and no padding.

    Outputs of masked tokens mean nothing.
    """
    x = hidden_states
    batch, num_tokens, num_heads, head_dim = x.shape
    is_ragged = mask is not None or lengths is not None
    if use_kernel and num_tokens == 1 and not is_ragged and has_kernel(B.shape[-1]):
        y, state = mlx_lm_ssm.ssm_update(x, A_log, B, C, D, dt, dt_bias, state, time_step_limit)
        record_block_states([state])
        return y, state
    dt = mlx_lm_ssm.compute_dt(dt, dt_bias, time_step_limit)
    if mask is not None:
        dt = mx.where(mask[..., None], dt, 0.0)
    if lengths is not None:
        dt = mx.where((mx.arange(num_tokens) < lengths[:, None])[..., None], dt, 0.0)
    gates = mx.exp(dt * -mx.exp(A_log.astype(mx.float32)))
    if state is None:
        state = mx.zeros((batch, num_heads, head_dim, B.shape[-1]), dtype=mx.float32)
    tokens = (C, B, x * dt[..., None], gates)
    if num_tokens == 1:
        y, state = gated_delta_step(*tokens, None, state.astype(mx.float32))
        record_block_states([state])
    else:
        y, state, block_states = gated_delta_chunked(*tokens, None, state)
        record_block_states(ColumnMajor(block_states))
    return y + x * D.reshape(num_heads, 1), state
