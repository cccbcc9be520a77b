"""A decode step is submitted without waiting for it, as far as memory is not at stake."""

from __future__ import annotations

from time import perf_counter

import mlx.core as mx

from pippin.backends.mlx.cpu.operations.bindings import Operations
from pippin.backends.mlx.cpu.run_ahead import MOST_TOKENS, running_ahead

NODES = 200


def seconds_to_submit(num_tokens: int) -> tuple[float, float]:
    """And those until all is computed."""
    x = mx.full((1 << 18,), 0.5)
    mx.eval(x)
    for _ in range(NODES):
        x = mx.sin(x)
    began = perf_counter()
    with running_ahead(num_tokens):
        mx.async_eval(x)
    submitted = perf_counter()
    mx.eval(x)
    return submitted - began, perf_counter() - began


def test_the_host_is_not_held_up_by_a_step_of_few_tokens(ours: Operations) -> None:
    submitted, computed = seconds_to_submit(MOST_TOKENS)
    assert submitted < 0.25 * computed
    submitted, computed = seconds_to_submit(MOST_TOKENS + 1)
    assert submitted > 0.5 * computed
