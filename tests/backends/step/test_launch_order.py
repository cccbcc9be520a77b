"""What a launch hands the device, and when."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from pippin.backends.mlx import backend as backend_module
from pippin.backends.mlx.prefill.batch import ChunkBatch
from serving import make_client, make_prompt


def test_running_streams_are_handed_over_before_a_prompts_graph_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Building it takes the host longer than the device needs for the streams' step."""
    events: list[str] = []
    hand_over = mx.async_eval

    class NotedBatch(ChunkBatch):
        def __init__(self, *args: Any) -> None:
            events.append("prompt")
            super().__init__(*args)

    def noted(*arrays: mx.array) -> None:
        events.append("device")
        hand_over(*arrays)

    client = make_client("llama")
    client.submit(make_prompt("llama", 20, 0), max_tokens=30)
    client.step(3)
    client.submit(make_prompt("llama", 20, 1), max_tokens=2)
    monkeypatch.setattr(backend_module, "ChunkBatch", NotedBatch)
    monkeypatch.setattr(mx, "async_eval", noted)
    client.step()
    assert events == ["device", "prompt", "device"]
    client.run()
