"""The Mamba-2 state space recurrence in plain MLX operations, blocked; knows no model or cache.

One token does (S is [Dh, Ds], dt its time step, g = exp(dt A)):

    S <- g S + dt x B^T;   y = S C + D x

That is the gated delta rule with queries C, keys B and values dt x, but for what that replaces.
A token past its row's length, or masked, has dt = 0: it forgets nothing and adds nothing, so
every row's state is right wherever the row ends.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import ssm as mlx_lm_ssm

from pippin.backends.mlx.recurrent.gated_delta import gated_delta_chunked, gated_delta_step
from pippin.backends.mlx.recurrent.mlx_lm_kernels import has_kernel
from pippin.backends.mlx.recurrent.taps import ColumnMajor, record_block_states


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
