"""What the device is handed, when, and what a step record says of the forwards that ran."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from builders import Client, Reply
from pippin.backends.mlx.prefill import prompts
from pippin.backends.mlx.prefill.batch import ChunkBatch
from pippin.backends.mlx.step.pending import RecentShapes
from pippin.types import StepForwards
from serving import make_client, make_prompt


@dataclass
class Watched:
    """What a loop's backend does in a step with a running stream and a new prompt."""

    events: list[str] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch, *, holds_back: bool) -> tuple[Client, Reply]:
        """A client that is one step before that, and the stream."""
        hand_over = mx.async_eval

        class NotedBatch(ChunkBatch):
            def __init__(noted, *args: Any) -> None:  # noqa: N805
                self.events.append("prompt built")
                super().__init__(*args)

        def noted(*arrays: mx.array) -> None:
            self.events.append("handed over")
            hand_over(*arrays)

        client = make_client("llama")
        client.loop.backend.holds_prompts_back = holds_back  # type: ignore[attr-defined]
        stream = client.submit(make_prompt("llama", 20, 0), max_tokens=30)
        client.step(3)
        client.submit(make_prompt("llama", 20, 1), max_tokens=2)
        monkeypatch.setattr(prompts, "ChunkBatch", NotedBatch)
        monkeypatch.setattr(mx, "async_eval", noted)
        return client, stream


def test_running_streams_are_handed_over_before_a_prompts_graph_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Building it takes the host longer than the device needs for the streams' step."""
    watched = Watched()
    client, _ = watched.watch(monkeypatch, holds_back=False)
    client.step()
    assert watched.events == ["handed over", "prompt built", "handed over"]
    client.run()


def test_a_prompt_held_back_is_handed_over_when_the_last_tokens_have_gone_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Metal: to hand it over takes as long as most of the prompt."""
    watched = Watched()
    client, stream = watched.watch(monkeypatch, holds_back=True)
    num_said = len(stream.tokens)
    client.step()
    assert watched.events == ["handed over", "prompt built"]
    assert len(stream.tokens) == num_said + 1
    client.step()
    assert watched.events[2:] == ["handed over", "handed over"]  # the prompt's, the next step's
    client.run()
    assert all(reply.finish == "length" for reply in client.replies.values())


def test_a_prompt_that_no_stream_runs_beside_is_never_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handed: list[int] = []
    hand_over = mx.async_eval

    def noted(*arrays: mx.array) -> None:
        handed.append(len(arrays))
        hand_over(*arrays)

    client = make_client("llama")
    client.loop.backend.holds_prompts_back = True  # type: ignore[attr-defined]
    client.submit(make_prompt("llama", 20, 0), max_tokens=3)
    monkeypatch.setattr(mx, "async_eval", noted)
    client.step()
    assert len(handed) == 1
    client.run()


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
