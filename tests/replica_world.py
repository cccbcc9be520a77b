"""Replicas in this process: loops on the toy model behind an EnginePool, and clients of it.

For tests of routing. Nothing here reads a clock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, cycle
from statistics import fmean
from typing import Any

from builders import make_loop
from pippin.engine.engine_client import EngineClient
from pippin.engine.engine_pool import EnginePool
from pippin.engine.kv_events import Announcer, prefix_reports
from pippin.messages import Abort, Submit, ToEngine, TokenBatch, pack_tokens
from pippin.types import SamplingParams

REPLY_TOKENS = 24
Scenario = Callable[["ReplicaWorld"], Coroutine[Any, Any, None]]


class LoopEngine:
    """An engine that computes one step when it is asked to."""

    alive = True

    def __init__(self, client: EngineClient, capacity_bytes: int) -> None:
        self._client = client
        self.num_asked = 0
        self._loop = make_loop(num_slots=16, capacity_bytes=capacity_bytes)
        cache = self._loop.scheduler.cache
        assert cache is not None
        self._announcer = Announcer()
        self._announcer.add(prefix_reports(cache.rules, client.deliver))
        self._announcer.observe("memory", cache)

    def send(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self.num_asked += 1
                self._loop.submit(message)
            case Abort(id):
                self._loop.abort(id)

    def step(self) -> None:
        if not self._loop.idle:
            self._client.deliver(TokenBatch(self._loop.step()))
            self._announcer.collect()


class RoundRobin(EnginePool):
    """What many proxies do."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__(num_replicas)
        self._turns: Iterator[EngineClient] = cycle(self.replicas)

    def _choose(self, hashes: list[int]) -> EngineClient:
        return next(self._turns)


@dataclass
class Counts:
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)


class ReplicaWorld:
    def __init__(self, engine: EnginePool, capacity_bytes: int, seed: int) -> None:
        """`capacity_bytes`: of all caches together."""
        self.engine = engine
        clients = engine.replicas
        self.engines = [LoopEngine(each, capacity_bytes // len(clients)) for each in clients]
        for client, started in zip(clients, self.engines, strict=True):
            client.engine_ready(started)
        self.counts = Counts()
        self.rng = random.Random(seed)
        self._ids = count()

    @property
    def num_asked(self) -> list[int]:
        """Requests of each engine."""
        return [engine.num_asked for engine in self.engines]

    def text(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(97) for _ in range(num_tokens)]

    async def ask(self, prompt: list[int], salt: bytes = b"") -> list[int]:
        """The reply; what the cache saved is counted."""
        params = SamplingParams(max_tokens=REPLY_TOKENS, temperature=0.0, ignore_eos=True)
        submit = Submit(
            str(next(self._ids)), pack_tokens(prompt), params, boundaries=[len(prompt)], salt=salt
        )
        reply: list[int] = []
        cached: int | None = None
        async for delta in self.engine.generate(submit):
            assert delta.error is None, delta.error
            cached = delta.cached_tokens if cached is None else cached
            reply += delta.tokens
        self.counts.prompt_tokens += len(prompt)
        self.counts.cached_tokens += cached or 0
        return reply

    async def run(self, scenario: Scenario) -> Counts:
        """Engines compute one step each in turn, until the clients have all they asked for."""
        clients = asyncio.create_task(scenario(self))
        while not clients.done():
            for engine in self.engines:
                engine.step()
            await asyncio.sleep(0)
        await clients
        return self.counts


async def conversations(world: ReplicaWorld) -> None:
    """Twelve clients of four agents, each with a system prompt; five turns of each client."""
    systems = [world.text(256) for _ in range(4)]

    async def talk(number: int) -> None:
        prompt = [*systems[number % len(systems)]]
        for _ in range(5):
            prompt += world.text(world.rng.choice([40, 90, 200]))
            prompt += await world.ask(prompt)

    await asyncio.gather(*map(talk, range(12)))


async def branches(world: ReplicaWorld) -> None:
    """Six documents, of each ten questions behind the same text, a few at a time."""
    documents = [world.text(768) for _ in range(6)]
    questions = [(which, world.text(30)) for which in range(6) for _ in range(10)]
    world.rng.shuffle(questions)

    async def work() -> None:
        while questions:
            which, question = questions.pop()
            await world.ask([*documents[which], *question])

    await asyncio.gather(*(work() for _ in range(6)))


WORKLOADS: dict[str, Scenario] = {"conversations": conversations, "branches": branches}
POLICIES: dict[str, Callable[[int], EnginePool]] = {
    "one cache": lambda num_replicas: EnginePool(),
    "routed by prefix": EnginePool,
    "round-robin": RoundRobin,
}


def hit_rate(policy: str, workload: str, *, num_replicas: int, nbytes: int, seed: int) -> float:
    async def work() -> float:
        world = ReplicaWorld(POLICIES[policy](num_replicas), nbytes, seed)
        return (await world.run(WORKLOADS[workload])).hit_rate

    return asyncio.run(work())


def mean_hit_rate(
    policy: str, workload: str, *, num_replicas: int, nbytes: int, seeds: Iterable[int]
) -> float:
    return fmean(
        hit_rate(policy, workload, num_replicas=num_replicas, nbytes=nbytes, seed=seed)
        for seed in seeds
    )
