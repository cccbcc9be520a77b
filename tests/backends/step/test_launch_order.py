"""What the device is handed, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from builders import Client, Reply
from pippin.backends.mlx.prefill import prompts
from pippin.backends.mlx.prefill.batch import ChunkBatch
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
