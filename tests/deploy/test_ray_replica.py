"""A supervised engine that is reached by values: from its start to its end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from api.scripted_engine import BUNDLED
from deploy.test_forwarding import ASK, CHAT, scope
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.deploy.forwarding import ForwardedRequest
from pippin.deploy.ray_replica import RayReplica
from pippin.errors import EngineDead, LoadError

pytestmark = pytest.mark.slow


def test_a_replica_responds_until_it_is_closed_and_then_fails_its_check() -> None:
    async def run() -> bytes:
        model = ModelConfig(model=str(BUNDLED), backend="fake")
        server = ServerConfig(served_name="stories", batch_bytes=0)
        replica = await RayReplica.start(Config(model, server=server))
        replica.check()
        body = json.dumps({**ASK, "max_tokens": 3, "ignore_eos": True}).encode()
        request = ForwardedRequest.of(scope(CHAT), body, "")
        messages = [message async for message in replica.respond(request)]
        assert messages[0]["status"] == 200
        await replica.close()
        with pytest.raises(EngineDead, match="stopped"):
            replica.check()
        return b"".join(message.get("body", b"") for message in messages)

    assert json.loads(asyncio.run(run()))["usage"]["completion_tokens"] == 3


def test_an_engine_that_cannot_start_is_an_error_of_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    model = ModelConfig(model=str(BUNDLED), backend="fake")
    engine = EngineConfig(cache_dir=str(file), disk="1GB")
    with pytest.raises(LoadError, match="file"):
        asyncio.run(RayReplica.start(Config(model, engine)))
