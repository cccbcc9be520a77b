"""Requests on a pool whose engines die, hang, restart and answer at any moment, from a seed.

Every request ends exactly once, with the right tokens; nothing of it is left behind.
"""

from __future__ import annotations

import asyncio
import random

from cases import cases
from pippin.engine.engine_pool import EnginePool
from pippin.errors import EngineDead, NotReady
from pippin.messages import (
    Abort,
    Finish,
    RestorablePrefixes,
    Shutdown,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
    pack_tokens,
)
from pippin.types import SamplingParams
from processes import PATIENCE_SECONDS

NUM_REPLICAS = 3
NUM_MOMENTS = 400
MAX_TOKENS = 5


def right_tokens(submit: Submit) -> list[int]:
    return [sum(submit.token_ids) + position for position in range(MAX_TOKENS)]


class RandomEngine:
    """Computes right tokens, sends them late, and loses what it has not sent."""

    def __init__(self, pool: EnginePool, number: int, rng: random.Random) -> None:
        self.alive = True
        self.stops = False
        self._replica = pool.replicas[number]
        self._rng = rng
        self._inbox: list[ToEngine] = []
        self._waiting: dict[str, Submit] = {}
        self._running: dict[str, tuple[Submit, int]] = {}

    def send(self, message: ToEngine) -> None:
        self._inbox.append(message)

    def turn(self) -> None:
        """Read, start or compute something, if it is alive."""
        if not self.alive:
            return
        while self._inbox and self._rng.random() < 0.7:
            self._read(self._inbox.pop(0))
        if self._waiting and self._rng.random() < 0.4:
            id, submit = next(iter(self._waiting.items()))
            del self._waiting[id]
            self._running[id] = (submit, 0)
            if self._rng.random() < 0.9:  # what was sent last may be lost
                self._replica.deliver(Started([id]))
        for id, (submit, position) in list(self._running.items()):
            if self._rng.random() < 0.5:
                self._compute(id, submit, position)
        if self._rng.random() < 0.2:
            hashes = [self._rng.randrange(50) for _ in range(5)]
            self._replica.deliver(RestorablePrefixes(stored=hashes, removed=hashes[:3]))

    def _read(self, message: ToEngine) -> None:
        match message:
            case Submit(id=id):
                assert id not in self._waiting | self._running
                self._waiting[id] = message
            case Abort(id) | Finish(id):
                self._waiting.pop(id, None)
                self._running.pop(id, None)
            case Shutdown():
                assert not self._running, "a stream was running"
                self.alive, self.stops = False, True

    def _compute(self, id: str, submit: Submit, position: int) -> None:
        count = self._rng.randint(1, 2)
        tokens = right_tokens(submit)[position : position + count]
        ends = position + count >= MAX_TOKENS
        del self._running[id]
        if not ends:
            self._running[id] = (submit, position + count)
        delta = TokenDelta(id, tokens, finish="length" if ends else None)
        self._replica.deliver(TokenBatch([delta]))


class PoolWorld:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = EnginePool(NUM_REPLICAS)
        self.engines: list[RandomEngine | None] = [None] * NUM_REPLICAS
        self.clients: dict[str, asyncio.Task[str]] = {}
        self.outcomes: dict[str, int] = {}

    async def client(self, submit: Submit) -> str:
        """How the request ended."""
        leaves_after = self.rng.choice([None, None, None, 0, 2])
        received: list[int] = []
        ends: list[str] = []
        deltas = self.pool.generate(submit)
        try:
            async for delta in deltas:
                received += delta.tokens
                if delta.finish is not None:
                    ends.append(delta.error_code or delta.finish)
                if leaves_after is not None and len(received) >= leaves_after:
                    if self.rng.random() < 0.5:
                        self.pool.finish(submit.id)
                    await deltas.aclose()
                    ends.append("left")
                    break
        except NotReady:
            return "refused"
        right = right_tokens(submit)
        assert received == right[: len(received)]
        assert len(ends) == 1 or ends[-1] == "left", ends
        assert ends[-1] != "length" or received == right
        return ends[-1]

    def moment(self, number: int) -> None:
        rng = self.rng
        if rng.random() < 0.3:
            prompt = [rng.randrange(9) for _ in range(rng.choice([3, 70, 200]))]
            submit = Submit(f"r{number}", pack_tokens([number, *prompt]), SamplingParams())
            self.clients[submit.id] = asyncio.create_task(self.client(submit))
        if rng.random() < 0.02 and self.clients:
            rng.choice(list(self.clients.values())).cancel()
        if rng.random() < 0.02 and self.pool.healthy:
            self.restart()
        for which, engine in enumerate(self.engines):
            if engine is None:
                if rng.random() < 0.2:
                    started = self.engines[which] = RandomEngine(self.pool, which, rng)
                    self.pool.replicas[which].engine_ready(started)
                continue
            engine.turn()
            if engine.alive and rng.random() < 0.02:
                engine.alive = False  # the supervisor notices later
            if not engine.alive and rng.random() < 0.3:
                self.engines[which] = None
                self.pool.replicas[which].engine_lost("it died", knows_all=engine.stops)

    def restart(self) -> None:
        if self.pool._restarting is None or self.pool._restarting.done():
            self.pool.restart()

    async def run(self) -> None:
        for number in range(NUM_MOMENTS):
            self.moment(number)
            await asyncio.sleep(0)
        while not all(task.done() for task in self.clients.values()):
            for which, engine in enumerate(self.engines):  # no more deaths
                if engine is None or not engine.alive:
                    if engine is not None:
                        self.pool.replicas[which].engine_lost("it died")
                    started = self.engines[which] = RandomEngine(self.pool, which, self.rng)
                    self.pool.replicas[which].engine_ready(started)
                else:
                    engine.turn()
            await asyncio.sleep(0)
        for task in self.clients.values():
            outcome = "cancelled" if task.cancelled() else task.result()
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1


@cases("seed", range(12))
def test_every_request_ends_once_with_the_right_tokens(seed: int) -> None:
    async def work() -> PoolWorld:
        world = PoolWorld(seed)
        await world.run()
        return world

    world = asyncio.run(asyncio.wait_for(work(), PATIENCE_SECONDS))
    known = {"length", "left", "refused", "cancelled", EngineDead.code}
    assert set(world.outcomes) <= known
    assert world.outcomes["length"] > 10
    pool = world.pool
    assert pool.num_open == 0
    assert not pool._places
    for replica in pool.replicas:
        assert replica.load == 0
        assert not replica.prefixes._expected
