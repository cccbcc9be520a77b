"""What a step record says of the forwards that ran: how many, and whether new."""

from __future__ import annotations

from builders import Client
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


def test_steps_of_two_rows_have_one_shape_whenever_they_joined() -> None:
    client = make_client("llama", cache=False)
    for length in (40, 50):
        client.submit(make_prompt("llama", length, length), max_tokens=40)
    client.run()
    together = [r.forwards for r in client.loop.scheduler.metrics.records if r.decode_rows == 2]
    assert [ran.new_decode for ran in together[:2]] == [1, 0]


def _last_prefill(client: Client) -> StepForwards:
    return [r.forwards for r in client.loop.scheduler.metrics.records if r.prefill_tokens][-1]
