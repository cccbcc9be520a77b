"""What a step record says of the forwards that ran: how many, how scattered, whether new."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from builders import Client
from pippin.backends.mlx.cpu.operations.bindings import operations, without_operations
from pippin.backends.mlx.step.recent_shapes import RecentShapes
from pippin.types import StepForwards
from serving import make_client, make_prompt


def test_a_shape_is_new_until_it_was_run_and_again_when_others_pushed_it_out() -> None:
    shapes = RecentShapes(max_shapes=2)
    assert [shapes.add(shape) for shape in ("a", "b", "a")] == [True, True, False]
    assert shapes.add("c")  # pushes out b: a was run after it
    assert not shapes.add("a")
    assert shapes.add("b")


def test_a_prompt_of_a_known_length_has_no_new_shape() -> None:
    client = make_client("llama", cache=False)
    new = []
    for seed, length in enumerate((40, 40, 100)):
        client.ask(make_prompt("llama", length, seed), max_tokens=1)
        new.append(_last_prefill(client).new_prefill)
    assert new == [1, 0, 1]
    assert _last_prefill(client).prefill == 1


@pytest.mark.parametrize("has_table", [True, False])
def test_rows_that_joined_one_by_one_lie_in_cohorts_of_their_own_until_they_settle(
    has_table: bool,
) -> None:
    """Unless one operation reads them wherever they lie."""
    if has_table and operations() is None:
        pytest.skip("no operations of ours on this device: rows have no KV table")
    client = make_client("llama", cache=False)
    for length in (40, 50):
        client.submit(make_prompt("llama", length, length), max_tokens=40)
    with nullcontext() if has_table else without_operations():
        client.run()
    together = [r.forwards for r in client.loop.scheduler.metrics.records if r.decode_rows == 2]
    assert [together[0].cohorts, together[-1].cohorts] == ([1, 1] if has_table else [2, 1])
    assert together[0].new_decode == 1
    assert together[1].new_decode == 0


def _last_prefill(client: Client) -> StepForwards:
    return [r.forwards for r in client.loop.scheduler.metrics.records if r.prefill_tokens][-1]
