"""The engine's half of the channel, in this process: how it starts and what it says at its end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from builders import make_loop
from pippin.api.engine_client import ZmqEngine
from pippin.build import build_loop
from pippin.cache.canary import CacheCorruption, Canary
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine import Channel, EngineSpec, serve
from pippin.messages import Submit, TokenDelta
from pippin.types import SamplingParams


async def ask(engine: ZmqEngine, id: str, prompt: list[int]) -> TokenDelta:
    """The terminal delta."""
    submit = Submit(id, prompt, SamplingParams(max_tokens=2, temperature=0.0))
    return [delta async for delta in engine.generate(submit)][-1]


def test_a_fault_found_by_a_raising_canary_is_why_the_engine_stopped(tmp_path: Path) -> None:
    loop = make_loop(canary=Canary("raise"))
    cache = loop.scheduler.cache
    assert cache is not None
    spec = EngineSpec(Config(), str(tmp_path))
    statuses: list[int] = []

    def run() -> None:
        channel = Channel(spec)
        statuses.append(serve(loop, channel))
        channel.close()

    async def work() -> None:
        engine = ZmqEngine(spec.inbox, spec.outbox)
        await engine.start()
        prompt = list(range(80))
        assert (await ask(engine, "a", prompt)).finish == "length"
        node = next(iter(cache._tree.root.children.values()))
        assert node.chain is not None
        node.chain[0] ^= np.uint64(1)
        spoiled = await ask(engine, "b", [*prompt, 1])
        assert (spoiled.finish, spoiled.error_status) == ("error", 503)
        assert spoiled.error is not None
        assert spoiled.error.startswith("the engine stopped: cache entry over tokens [0, ")
        assert engine.reason == spoiled.error
        await engine.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    asyncio.run(asyncio.wait_for(work(), 20))
    thread.join(timeout=20)
    assert statuses == [1]


def test_an_engine_with_a_canary_starts_with_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Canary, "_fault", lambda canary, node, expected: None)
    for mode in ("log", "raise"):
        config = Config(ModelConfig(backend="fake"), EngineConfig(canary=mode))
        with pytest.raises(CacheCorruption, match="self-test"):
            build_loop(config, lambda stage: None)
    build_loop(Config(ModelConfig(backend="fake")), lambda stage: None).close()
