"""An app of several models on engines that a test scripts, loads and loses. No process, no port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from scripted_engine import TEXT, Script, ScriptedEngine, say

from pippin.api.app import Application
from pippin.api.model_info import ModelInfo
from pippin.api.served_models import ServedModels, SwitchedModel, TextCache
from pippin.config import LimitsConfig, ServerConfig
from pippin.errors import EngineDead, LoadError, NotReady
from pippin.messages import Ready, Submit, TokenDelta
from pippin.switching import ModelEngines, ModelTurn, Turns


class FakeEngine(ScriptedEngine):
    """Its replies stop after each token while the gate is closed."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.is_closed = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        async with aclosing(super().generate(submit)) as deltas:
            async for delta in deltas:
                await self.gate.wait()
                yield delta

    async def counters(self) -> dict[str, Any]:
        raise NotReady("it counts nothing")

    def close(self) -> None:
        self.is_closed = True


class FakeHost:
    """Loads when it is run, unless the test says why it cannot."""

    def __init__(self, script: Script, failure: str | None, gate: asyncio.Event) -> None:
        self.engine = FakeEngine(script)
        self.loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.dies = asyncio.Event()
        self._failure = failure
        self._gate = gate

    async def run(self) -> None:
        await self._gate.wait()
        if self._failure is not None:
            raise LoadError(self._failure)
        self.loaded.set_result(Ready(vocab_size=8192, max_len=4096))
        await self.dies.wait()
        raise EngineDead("the engine failed 6 times in a row")


@dataclass
class World:
    """The server, what it started, and a clock that the test moves."""

    client: httpx.AsyncClient
    engines: ModelEngines
    now: list[float]
    hosts: list[tuple[str, FakeHost]]
    scripts: dict[str, Script] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    loads: asyncio.Event = field(default_factory=asyncio.Event)  # loads end once it is set

    @property
    def started(self) -> list[str]:
        return [name for name, _ in self.hosts]

    def state(self, name: str) -> str:
        return self.engines.turn(name).state

    async def chat(self, model: str | None = None, **fields: object) -> httpx.Response:
        named = {} if model is None else {"model": model}
        messages = [{"role": "user", "content": "Hi."}]
        body = {**named, "messages": messages, "max_tokens": 4, **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    def wait(self, seconds: float) -> None:
        self.now[0] += seconds
        self.engines.advance()

    async def until_waiting(self, name: str, number: int = 1) -> None:
        """So many requests for the model wait: threads have read them."""
        while len(self.engines.turn(name).waiting) < number:
            await asyncio.sleep(0.001)

    async def settle(self) -> None:
        """Until nothing happens any more without time or a client."""
        for _ in range(50):
            await asyncio.sleep(0)


@asynccontextmanager
async def serving_several(
    names: Sequence[str] = ("alpha", "beta", "gamma"),
    *,
    room: int = 1,
    max_waiting: int = 100,
    keep_alive: float | None = 300.0,
    config: ServerConfig | None = None,
) -> AsyncIterator[World]:
    """`room`: how many models fit at the same time."""
    config, limits = config or ServerConfig(), LimitsConfig()
    now, hosts = [1000.0], []
    world: World

    def start(name: str) -> FakeHost:
        script = world.scripts.get(name, say(f"I am {name}."))
        host = FakeHost(script, world.failures.get(name), world.loads)
        hosts.append((name, host))
        return host

    turns = Turns(
        [ModelTurn(name, 1, keep_alive) for name in names],
        budget=room,
        turn_s=10.0,
        max_waiting=max_waiting,
    )
    engines = ModelEngines(turns, start, clock=lambda: now[0])
    texts = TextCache()
    models = [
        SwitchedModel(
            ModelInfo(
                name,
                max_len=8192,
                vocab_size=8192,
                created_s=1,
                aliases=(f"{name}-alias",),
                other_names=tuple(other for other in names if other != name),
                on_demand=True,
            ),
            engines,
            texts,
            lambda: TEXT,
            config,
            limits,
        )
        for name in names
    ]
    app = Application(ServedModels(models), config, limits)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        world = World(client, engines, now, hosts)
        world.loads.set()
        running = asyncio.create_task(engines.run())
        try:
            yield world
        finally:
            await app.close()
            running.cancel()
            await asyncio.wait((running,))
