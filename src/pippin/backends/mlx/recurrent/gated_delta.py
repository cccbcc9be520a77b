"""The gated delta rule in plain MLX operations, blocked; knows no model, cache or batch.

One token does (S is [Dv, Dk], g the gate, b = beta):

    S <- g S;   S <- S + b (v - S k) k^T;   y = S q

A block of 64 tokens that starts from S does the same as a few products. With G[t,s] the product
of the gates s+1..t, and T = (I + tril(b G (K K^T), -1))^-1 b:

    U = T V - T (g1 K) S^T       what each token adds, g1 = gates from the block's start
    Y = (g1 Q) S^T + tril(G (Q K^T)) U
    S' = g_end S + U^T (G_end K) = S A + B,   A = g_end - (T g1 K)^T (G_end K)

All but the last line is done for every block and head at once; S' is one product per block.
Without b nothing of what the state holds is replaced (U = V, A = g_end): Mamba-2, in ssm.py.
Decays are running products of gates (`blocks.decay_matrix`): no logarithm for a gate of zero to
send to infinity, no difference of large sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models import gated_delta as mlx_lm_gated_delta

from pippin.backends.mlx.recurrent.blocks import (
    decay_matrix,
    drop_faint,
    join_blocks,
    split_blocks,
)
from pippin.backends.mlx.recurrent.mlx_lm_kernels import has_kernel, run_in_slices
from pippin.backends.mlx.recurrent.taps import ColumnMajor, record_block_states
from pippin.backends.mlx.recurrent.triangular import stack_lower, unit_lower_inverse


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
