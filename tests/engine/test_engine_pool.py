"""Several engines as one. The engines here are lists of what was sent to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pippin.engine.engine_pool import EnginePool
from pippin.engine.kv_events import BLOCK_TOKENS, prompt_hashes
from pippin.errors import EngineDead, NotReady, Overloaded, RequestError
from pippin.messages import (
    Abort,
    Answer,
    Finish,
    FlushCache,
    GetStatus,
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

LOST = "the engine process was killed by SIGKILL"
PREFIX = list(range(4 * BLOCK_TOKENS))
Scenario = Callable[["Engines"], Coroutine[Any, Any, None]]


class SentMessages(list[ToEngine]):
    alive = True

    def send(self, message: ToEngine) -> None:
        self.append(message)

    @property
    def ids(self) -> list[str]:
        return [message.id for message in self if isinstance(message, Submit)]


class Engines:
    """A pool whose engines are ready."""

    def __init__(self, count: int = 2) -> None:
        self.pool = EnginePool(count)
        self.sent = [self.start(number) for number in range(count)]

    def start(self, number: int) -> SentMessages:
        sent = SentMessages()
        self.pool.replicas[number].engine_ready(sent)
        return sent

    async def ask(self, id: str, tokens: list[int] | None = None, **fields: Any) -> Asked:
        submit = Submit(id, pack_tokens(tokens or [1, ord(id[0])]), SamplingParams(), **fields)
        asked = asyncio.create_task(collect(self.pool, submit))
        await asyncio.sleep(0)  # until it waits
        return asked

    def say(self, number: int, *deltas: TokenDelta) -> None:
        self.pool.replicas[number].deliver(TokenBatch(list(deltas)))

    def report(self, number: int, tokens: list[int], salt: bytes = b"") -> None:
        hashes = prompt_hashes(pack_tokens(tokens), salt)
        self.pool.replicas[number].deliver(RestorablePrefixes(stored=hashes))


Asked = asyncio.Task[list[TokenDelta]]


async def collect(pool: EnginePool, submit: Submit) -> list[TokenDelta]:
    return [delta async for delta in pool.generate(submit)]


def with_engines(scenario: Scenario) -> Callable[[], None]:
    async def work() -> None:
        await scenario(Engines())

    return lambda: asyncio.run(asyncio.wait_for(work(), PATIENCE_SECONDS))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


# ---- routing -----------------------------------------------------------------------------------


@with_engines
async def test_a_prompt_goes_where_it_can_be_restored_and_others_where_there_is_less_to_do(
    engines: Engines,
) -> None:
    engines.report(1, PREFIX)
    await engines.ask("a", [*PREFIX, 7])
    await engines.ask("b", [5] * 10)
    assert [sent.ids for sent in engines.sent] == [["b"], ["a"]]


@with_engines
async def test_a_long_queue_outweighs_a_short_prefix(engines: Engines) -> None:
    engines.report(1, PREFIX)
    await engines.ask("a", [*PREFIX, *[9] * 12 * BLOCK_TOKENS])
    await engines.ask("b", [*PREFIX, 8])
    assert [sent.ids for sent in engines.sent] == [["b"], ["a"]]
    engines.say(1, TokenDelta("a", [1]))  # its prompt is computed
    await settle()
    await engines.ask("c", [*PREFIX, 7])
    assert engines.sent[1].ids == ["a", "c"]


@with_engines
async def test_a_prefix_of_one_salt_is_none_of_another(engines: Engines) -> None:
    engines.report(1, PREFIX, salt=b"s" * 32)
    await engines.ask("a", [*PREFIX, 7])
    await engines.ask("b", [*PREFIX, 7], salt=b"s" * 32)
    assert [sent.ids for sent in engines.sent] == [["a"], ["b"]]


@with_engines
async def test_without_prefixes_requests_are_spread(engines: Engines) -> None:
    engines = Engines(3)
    for number in range(9):
        await engines.ask(f"{number}")
    assert [len(sent.ids) for sent in engines.sent] == [3, 3, 3]


# ---- engines that are lost ---------------------------------------------------------------------


@with_engines
async def test_requests_that_had_not_started_move_at_once_and_the_others_end(
    engines: Engines,
) -> None:
    replica = engines.pool.replicas[0]
    engines.report(0, PREFIX)
    started = await engines.ask("a", PREFIX)
    waiting = await engines.ask("b", PREFIX)
    assert engines.sent[0].ids == ["a", "b"]
    replica.deliver(Started(["a"]))
    replica.engine_lost(LOST)
    assert engines.sent[1].ids == ["b"]
    assert engines.pool.healthy
    engines.say(1, TokenDelta("b", [3], finish="stop"))
    assert (await started)[-1].error_code == EngineDead.code
    assert await waiting == [TokenDelta("b", [3], finish="stop")]


@with_engines
async def test_requests_wait_while_no_engine_serves_and_the_first_that_does_takes_them(
    engines: Engines,
) -> None:
    for sent in engines.sent:
        sent.alive = False  # both died, and the server has not noticed
    asked = await engines.ask("a")
    for replica in engines.pool.replicas:
        replica.engine_lost(LOST)
    assert not engines.pool.healthy
    with pytest.raises(NotReady):
        await collect(engines.pool, Submit("b", pack_tokens([1]), SamplingParams()))
    home = next(n for n, each in enumerate(engines.pool.replicas) if each.num_open)
    sent = engines.start(1 - home)
    assert sent.ids == ["a"]
    engines.say(1 - home, TokenDelta("a", [4], finish="stop"))
    assert await asked == [TokenDelta("a", [4], finish="stop")]


# ---- what else is asked of an engine -----------------------------------------------------------


@with_engines
async def test_ends_of_requests_reach_their_engine(engines: Engines) -> None:
    engines.report(1, PREFIX)
    await engines.ask("a", PREFIX)
    await engines.ask("b")
    engines.pool.abort("a")
    engines.pool.finish("b")
    engines.pool.abort("unknown")
    assert engines.sent[1][-1] == Abort("a")
    assert engines.sent[0][-1] == Finish("b")
    assert [replica.load for replica in engines.pool.replicas] == [0, 0]


async def answer(engines: Engines, *answers: dict[str, Any]) -> None:
    """The latest question of each engine."""
    await settle()
    for replica, sent, data in zip(engines.pool.replicas, engines.sent, answers, strict=True):
        question = sent[-1]
        assert isinstance(question, GetStatus | FlushCache)
        replica.deliver(Answer(question.id, data))


@with_engines
async def test_a_status_is_the_sum_and_names_each_replica(engines: Engines) -> None:
    asked = asyncio.create_task(engines.pool.status())
    paths = [{"recent_paths": [{"tokens": n}], "hits": n, "hit_rate": 0.5} for n in (1, 2)]
    parts = [{"tokens_matched": 10 * n, "tokens_looked_up": 40} for n in (1, 2)]
    first, second = (path | part for path, part in zip(paths, parts, strict=True))
    await answer(
        engines,
        {"running": 1, "idle_share": 0.2, "cache": first, "host": None, "overlap": True},
        {"running": 2, "idle_share": 0.4, "cache": second, "host": None, "overlap": True},
    )
    status = await asked
    assert [each["state"] for each in status.pop("replicas")] == ["serving", "serving"]
    assert status == {
        "running": 3,
        "idle_share": pytest.approx(0.3),
        "cache": {
            "recent_paths": [{"tokens": 1}, {"tokens": 2}],
            "hits": 3,
            "hit_rate": 30 / 80,
            "tokens_matched": 30,
            "tokens_looked_up": 80,
        },
        "host": None,
        "overlap": True,
    }


@with_engines
async def test_a_flush_reaches_all_and_survives_the_loss_of_one(engines: Engines) -> None:
    asked = asyncio.create_task(engines.pool.flush_cache())
    await answer(engines, {"freed_bytes": 1}, {"freed_bytes": 2})
    assert await asked == {"freed_bytes": 3}
    asked = asyncio.create_task(engines.pool.flush_cache())
    await settle()
    engines.pool.replicas[0].engine_lost(LOST)
    flush = engines.sent[1][-1]
    assert isinstance(flush, FlushCache)
    engines.pool.replicas[1].deliver(Answer(flush.id, {"freed_bytes": 2}))
    assert await asked == {"freed_bytes": 2}


@with_engines
async def test_a_replica_that_does_not_exist_cannot_be_watched(engines: Engines) -> None:
    with pytest.raises(RequestError, match="replica is 2: use 0 to 1"):
        engines.pool.watch(2)


# ---- replacing engines one at a time -----------------------------------------------------------


async def answer_shutdown(engines: Engines, number: int) -> None:
    await settle()
    assert engines.sent[number][-1] == Shutdown()
    replica = engines.pool.replicas[number]
    assert replica.is_restarting
    replica.engine_lost("the engine process exited with status 0")
    assert replica.exited_as_asked()
    assert replica.state == "restarting"
    engines.sent[number] = engines.start(number)
    await settle()


@with_engines
async def test_replicas_restart_one_after_another_and_no_stream_ends(engines: Engines) -> None:
    engines.report(0, PREFIX)
    stream = await engines.ask("a", PREFIX)
    engines.say(0, TokenDelta("a", [1]))
    engines.pool.restart()
    with pytest.raises(Overloaded):
        engines.pool.restart()
    await settle()
    assert Shutdown() not in engines.sent[0]
    during = await engines.ask("b", PREFIX)  # could be restored there, but it is to be drained
    assert engines.sent[1].ids == ["b"]
    engines.say(0, TokenDelta("a", [2], finish="stop"))
    assert [delta.tokens for delta in await stream] == [[1], [2]]
    await answer_shutdown(engines, 0)
    assert Shutdown() not in engines.sent[1]
    engines.say(1, TokenDelta("b", [3], finish="stop"))
    assert [delta.tokens for delta in await during] == [[3]]
    await answer_shutdown(engines, 1)
    assert [replica.state for replica in engines.pool.replicas] == ["serving", "serving"]
    engines.pool.restart()  # that one is done


@with_engines
async def test_a_restart_ends_where_an_engine_cannot_be_replaced_and_the_others_serve(
    engines: Engines,
) -> None:
    engines.pool.restart()
    await settle()
    replica = engines.pool.replicas[0]
    replica.engine_lost("the engine process exited with status 0")
    assert replica.exited_as_asked()
    for _ in range(3):  # what follows are failures, which a supervisor counts
        replica.engine_lost(LOST)
        assert not replica.exited_as_asked()
    replica.give_up("the engine failed 3 times in a row")
    await settle()
    assert replica.state == "the engine failed 3 times in a row"
    assert Shutdown() not in engines.sent[1]
    await engines.ask("a")
    assert engines.sent[1].ids == ["a"]
    engines.pool.restart()  # the one before has ended; this one tries that replica again
    await settle()
    assert replica.is_wanted.is_set()
    engines.sent[0] = engines.start(0)
    await settle()
    assert replica.state == "serving"


@with_engines
async def test_requests_wait_for_an_engine_that_restarts_where_there_is_no_other(
    engines: Engines,
) -> None:
    engines.pool.restart()
    await settle()
    assert engines.sent[0][-1] == Shutdown()
    engines.pool.replicas[1].engine_lost(LOST)
    waiting = await engines.ask("a")
    assert engines.sent[0].ids == engines.sent[1].ids == []
    await answer_shutdown(engines, 0)
    assert engines.sent[0].ids == ["a"]
    engines.say(0, TokenDelta("a", [1], finish="stop"))
    assert (await waiting)[-1].finish == "stop"
    engines.pool.close()
