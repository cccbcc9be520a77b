"""How work is captured, on a CUDA that is made up."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from pippin.backends.torch.capture import CudaGraphs

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
PLACE = "src/pippin/backends/torch/capture.py"


def test_other_threads_may_call_cuda_while_work_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In CUDA's own mode any other thread's call, say an allocation, breaks the capture."""
    asked: list[dict[str, Any]] = []

    @contextmanager
    def graph(captured: object, **options: Any) -> Iterator[None]:
        asked.append({"captured": captured} | options)
        yield

    made = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "memory")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "forward")
    graphs = CudaGraphs()
    recorded = [graphs.record(lambda n=n: n) for n in (7, 8)]
    assert [each.result for each in recorded] == [7, 8]
    assert recorded[0].replay is made.replay
    each = {"captured": made, "pool": "memory", "stream": "forward"}
    assert asked == [each | {"capture_error_mode": "thread_local"}] * 2


def test_nobody_else_captures() -> None:
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("tools/*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if "cuda.graph(" in path.read_text()}
    assert found == {PLACE}
