"""The Mamba-2 state space recurrence in plain MLX operations, blocked; knows no model or cache.

One token does (S is [Dh, Ds], dt its time step, g = exp(dt A)):

    S <- g S + dt x B^T;   y = S C + D x

A block of 64 tokens that starts from S, with G[t,s] the product of the gates s+1..t:

    Y = tril(G (C B^T) dt) X + (g1 C) S^T;   S' = g_end S + (G_end dt X)^T B

A token past its row's length, or masked, has dt = 0: it forgets nothing and adds nothing, so
every row's state is right wherever the row ends.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import ssm as mlx_lm_ssm

from pippin.backends.mlx.recurrent.blocks import decay_matrix, drop_faint, join_blocks, split_blocks
from pippin.backends.mlx.recurrent.mlx_lm_kernels import has_kernel
from pippin.backends.mlx.recurrent.taps import record_block_states


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
    if num_tokens == 1:
        y, state = ssm_step(x, dt, gates, B, C, state)
        record_block_states([state])
    else:
        y, state, block_states = ssm_chunked(x, dt, gates, B, C, state)
        record_block_states(block_states)
    return y + x * D.reshape(num_heads, 1), state


def ssm_step(
    x: mx.array,  # [B, 1, H, Dh]
    dt: mx.array,  # float32 [B, 1, H]
    gates: mx.array,  # float32 [B, 1, H]
    B: mx.array,  # noqa: N803  [B, 1, G, Ds]
    C: mx.array,  # noqa: N803  [B, 1, G, Ds]
    state: mx.array,  # [B, H, Dh, Ds]
) -> tuple[mx.array, mx.array]:
    """One token, without the D term."""
    batch, _, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    shape = (batch, num_groups, num_heads // num_groups)
    old = state.astype(mx.float32).reshape(*shape, head_dim, state_dim)
    write = (x * dt[..., None]).reshape(*shape, head_dim, 1)
    row = B.astype(mx.float32).reshape(batch, num_groups, 1, 1, state_dim)
    column = C.astype(mx.float32).reshape(batch, num_groups, 1, state_dim, 1)
    new = mx.addmm(old * gates.reshape(*shape, 1, 1), write, row)
    return (new @ column).reshape(x.shape).astype(x.dtype), new.reshape(state.shape)


def ssm_chunked(
    x: mx.array,  # [B, T, H, Dh]
    dt: mx.array,  # float32 [B, T, H]
    gates: mx.array,  # float32 [B, T, H], within 0..1
    B: mx.array,  # noqa: N803  [B, T, G, Ds]
    C: mx.array,  # noqa: N803  [B, T, G, Ds]
    state: mx.array,  # [B, H, Dh, Ds]
) -> tuple[mx.array, mx.array, list[mx.array]]:
    """Many tokens, without the D term: (y, final state, the state after each block of 64)."""
    batch, num_tokens, _, head_dim = x.shape
    num_groups, state_dim = B.shape[2:]
    x_, dt_, b_, c_ = (split_blocks(z, num_groups) for z in (x, dt, B, C))
    gates_ = split_blocks(gates, num_groups, fill=1.0)

    weights = decay_matrix(gates_) * dt_[..., None, :]
    from_start = drop_faint(mx.cumprod(gates_, axis=-1))[..., None]
    gain = (x_ * weights[..., -1, :, None]).swapaxes(-1, -2) @ b_
    decay = from_start[..., -1:, :]

    states = [state.astype(mx.float32).reshape(batch, num_groups, -1, head_dim, state_dim)]
    for n in range(gain.shape[1]):
        states.append(states[-1] * decay[:, n] + gain[:, n])

    starts = mx.stack(states[:-1], axis=1).swapaxes(-1, -2)
    attention = (c_ @ b_.swapaxes(-1, -2)) * weights
    y = mx.addmm((c_ @ starts) * from_start, attention, x_)
    block_states = [s.reshape(state.shape) for s in states[1:]]
    return join_blocks(y.astype(x.dtype), num_tokens), block_states[-1], block_states
