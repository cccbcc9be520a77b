"""A pool of one engine with its replica's calls beside its own; engine processes that are noted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pippin import supervision
from pippin.engine.engine_pool import EnginePool
from pippin.messages import Submit, TokenDelta, pack_tokens
from pippin.supervision import EngineProcess
from pippin.types import SamplingParams
from processes import environment


class OneEngine(EnginePool):
    def __init__(self) -> None:
        super().__init__()
        [self.replica] = self.replicas
        self.engine_ready = self.replica.engine_ready
        self.engine_lost = self.replica.engine_lost
        self.deliver = self.replica.deliver


def noted_processes(monkeypatch: pytest.MonkeyPatch) -> list[EngineProcess]:
    """Every engine process that a supervisor starts from now on, in order."""
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    started: list[EngineProcess] = []

    class NotedProcess(EngineProcess):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            started.append(self)

    monkeypatch.setattr(supervision, "EngineProcess", NotedProcess)
    return started


async def ask(pool: EnginePool, id: str, tokens: list[int], max_tokens: int) -> list[TokenDelta]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [delta async for delta in pool.generate(Submit(id, pack_tokens(tokens), params))]


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
