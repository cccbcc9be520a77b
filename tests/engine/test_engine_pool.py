"""Requests on one engine or several that come and go. They are lists of what was sent to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from one_engine import OneEngine
from pippin.engine.engine_client import (
    MAX_DEATHS,
    MAX_ENGINES,
    REMEMBERED_SUSPECTS,
    DeltaQueue,
    Suspects,
)
from pippin.engine.engine_pool import EnginePool
from pippin.engine.kv_events import BLOCK_TOKENS, prompt_hashes
from pippin.errors import (
    DeviceFailed,
    EngineDead,
    NotReady,
    Overloaded,
    PippinError,
    PoisonRequest,
    RequestError,
)
from pippin.messages import (
    Abort,
    Answer,
    Compiled,
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
from pippin.types import SamplingParams, TokenLogprobs
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
        asked = asyncio.create_task(collect_from(self.pool, submit))
        await asyncio.sleep(0)  # until it waits
        return asked

    def say(self, number: int, *deltas: TokenDelta) -> None:
        self.pool.replicas[number].deliver(TokenBatch(list(deltas)))

    def report(self, number: int, tokens: list[int], salt: bytes = b"") -> None:
        hashes = prompt_hashes(pack_tokens(tokens), salt)
        self.pool.replicas[number].deliver(RestorablePrefixes(stored=hashes))


Asked = asyncio.Task[list[TokenDelta]]


async def collect_from(pool: EnginePool, submit: Submit) -> list[TokenDelta]:
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
        await collect_from(engines.pool, Submit("b", pack_tokens([1]), SamplingParams()))
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


class Client(OneEngine):
    """Its first engine is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = SentMessages()
        self.engine_ready(self.sent)


def with_engine(scenario: Callable[[Client], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def work() -> None:
        await scenario(Client())

    return lambda: asyncio.run(asyncio.wait_for(work(), PATIENCE_SECONDS))


def submit(id: str = "a", **params: Any) -> Submit:
    return Submit(id, pack_tokens([1, ord(id[0])]), SamplingParams(**params))


async def collect(client: OneEngine, id: str, **params: Any) -> list[TokenDelta]:
    return [delta async for delta in client.generate(submit(id, **params))]


async def open_requests(client: OneEngine, *ids: str) -> list[asyncio.Task[list[TokenDelta]]]:
    tasks = [asyncio.create_task(collect(client, id)) for id in ids]
    await asyncio.sleep(0)  # each runs until it waits
    return tasks


def say(client: OneEngine, *deltas: TokenDelta) -> None:
    client.deliver(TokenBatch(list(deltas)))


def dead(id: str, reason: str = LOST) -> TokenDelta:
    return TokenDelta(id, finish="error", error=reason, error_code="engine_dead", error_status=503)


@with_engine
async def test_deltas_reach_the_request_they_belong_to(client: Client) -> None:
    tasks = await open_requests(client, "a", "b")
    say(client, TokenDelta("a", [1]), TokenDelta("b", [2]))
    await asyncio.sleep(0)  # each reads what it got
    say(client, TokenDelta("x", [9]), TokenDelta("b", finish="stop"))
    say(client, TokenDelta("a", [3], finish="length"))
    a, b = await asyncio.gather(*tasks)
    assert a == [TokenDelta("a", [1]), TokenDelta("a", [3], finish="length")]
    assert b == [TokenDelta("b", [2]), TokenDelta("b", finish="stop")]
    client.abort("a")  # over: nothing to say
    assert client.sent == [submit("a"), submit("b")]


@with_engine
async def test_closing_a_request_early_aborts_it(client: Client) -> None:
    async with aclosing(client.generate(submit())) as deltas:
        first = asyncio.create_task(anext(deltas))
        await asyncio.sleep(0)
        say(client, TokenDelta("a", [1]))
        await first
    assert client.sent == [submit(), Abort("a")]


@with_engine
async def test_status_and_flush_are_answered(client: Client) -> None:
    tasks = [asyncio.create_task(ask()) for ask in (client.status, client.flush_cache)]
    await asyncio.sleep(0)
    status, flush = client.sent
    assert isinstance(status, GetStatus)
    assert isinstance(flush, FlushCache)
    client.deliver(Answer(flush.id, {"freed": 1}))
    client.deliver(Answer(status.id, {"running": 2}))
    assert await asyncio.gather(*tasks) == [{"running": 2}, {"freed": 1}]


@with_engine
async def test_a_question_that_could_not_be_answered_is_an_error(client: Client) -> None:
    asking = asyncio.create_task(client.status())
    await asyncio.sleep(0)
    question = client.sent[0]
    assert isinstance(question, GetStatus)
    client.deliver(Answer(question.id, {}, error="the tree is broken"))
    with pytest.raises(PippinError, match="the tree is broken"):
        await asking
    assert client.healthy


@with_engine
async def test_what_an_engine_had_begun_ends_when_it_is_lost(client: Client) -> None:
    started, speaking = await open_requests(client, "a", "b")
    asking = asyncio.create_task(client.status())
    await asyncio.sleep(0)
    client.deliver(Started(["a"]))
    say(client, TokenDelta("b", [1]))
    client.engine_lost(LOST)
    assert await started == [dead("a")]
    assert await speaking == [TokenDelta("b", [1]), dead("b")]
    with pytest.raises(EngineDead, match="SIGKILL"):
        await asking
    assert not client.healthy
    assert client.reason == f"{LOST}; another is being started"


@with_engine
async def test_what_no_engine_had_begun_goes_to_the_next_in_its_order(client: Client) -> None:
    started, left, *waiting = await open_requests(client, "a", "b", "c", "d")
    client.deliver(Started(["a"]))
    client.engine_lost(LOST)
    assert await started == [dead("a")]
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    second = SentMessages()
    client.engine_ready(second)
    assert client.healthy
    assert second == [submit("c"), submit("d")]
    for id in "cd":
        say(client, TokenDelta(id, [7], finish="length"))
    assert await asyncio.gather(*waiting) == [[TokenDelta(id, [7], finish="length")] for id in "cd"]
    assert client.sent == [submit(id) for id in "abcd"], "and nothing later"


@with_engine
async def test_a_reply_that_is_whole_when_its_engine_is_lost_stays_whole(client: Client) -> None:
    [task] = await open_requests(client, "a")
    say(client, TokenDelta("a", [1], finish="stop"))
    client.engine_lost(LOST)
    assert await task == [TokenDelta("a", [1], finish="stop")]
    second = SentMessages()
    client.engine_ready(second)
    assert second == []


@with_engine
async def test_a_request_that_may_have_been_alone_in_its_step_is_not_submitted_again(
    client: Client,
) -> None:
    """An engine may die of it before what it said of it has left the process."""

    tasks = await open_requests(client, "a", "b")
    client.engine_lost(LOST)
    assert await asyncio.gather(*tasks) == [[dead("a")], [dead("b")]]
    second = SentMessages()
    client.engine_ready(second)
    assert second == []


@with_engine
async def test_a_request_is_submitted_to_a_second_engine_and_to_no_third(client: Client) -> None:
    [waiting] = await open_requests(client, "a")
    for number in range(MAX_ENGINES):
        [other] = await open_requests(client, f"other {number}")
        client.deliver(Started([f"other {number}"]))
        client.engine_lost(LOST)
        await other
        assert client.num_open == (number + 1 < MAX_ENGINES)
        client.engine_ready(client.sent)
    assert await waiting == [dead("a")]
    assert client.sent.count(submit("a")) == MAX_ENGINES == 2


@with_engine
async def test_a_request_whose_grammar_may_be_compiling_is_not_submitted_again(
    client: Client,
) -> None:
    for id in ("a", "b"):
        [running] = await open_requests(client, "r")
        client.deliver(Started(["r"]))
        asking = asyncio.create_task(collect(client, id, regex="x"))
        await asyncio.sleep(0)
        if id == "b":
            client.deliver(Compiled(["b"]))
        client.engine_lost(LOST)
        await running
        second = SentMessages()
        client.engine_ready(second)
        assert second == ([submit("b", regex="x")] if id == "b" else [])
    client.close()
    await asking


@with_engine
async def test_what_was_submitted_to_an_engine_that_had_died_goes_to_the_next(
    client: Client,
) -> None:
    """However often: none of them can have died of it."""

    client.sent.alive = False
    [task] = await open_requests(client, "a")
    for _ in range(5):
        client.engine_lost(LOST)
        client.engine_ready(client.sent)
    assert client.sent == []
    client.engine_lost(LOST)
    client.sent.alive = True
    client.engine_ready(client.sent)
    assert client.sent == [submit("a")]
    say(client, TokenDelta("a", [1], finish="stop"))
    assert await task == [TokenDelta("a", [1], finish="stop")]


@with_engine
async def test_a_request_that_was_in_flight_at_two_deaths_is_refused_for_good(
    client: Client,
) -> None:
    for _ in range(MAX_DEATHS):
        [task] = await open_requests(client, "a")
        client.deliver(Started(["a"]))
        client.engine_lost(LOST)
        assert await task == [dead("a")]
        client.engine_ready(client.sent)
    for id in ("a", "a again"):
        with pytest.raises(PoisonRequest, match="until the server is restarted") as caught:
            await collect(client, id)
        assert caught.value.status == 400
    [other] = await open_requests(client, "b")
    say(client, TokenDelta("b", [1], finish="stop"))
    await other


@with_engine
async def test_a_request_that_was_served_between_two_deaths_is_not_refused(client: Client) -> None:
    for _ in range(3):
        [task] = await open_requests(client, "a")
        client.deliver(Started(["a"]))
        client.engine_lost(LOST)
        await task
        client.engine_ready(client.sent)
        [task] = await open_requests(client, "a")
        say(client, TokenDelta("a", [1], finish="length"))
        await task


def test_another_id_or_salt_makes_no_other_request() -> None:
    suspects = Suspects()
    for number in range(MAX_DEATHS):
        suspects.engine_lost([msgspec.structs.replace(submit("a"), salt=b"%d" % number)])
    with pytest.raises(PoisonRequest):
        suspects.check(msgspec.structs.replace(submit("a"), id="b", salt=b"another"))


def test_suspects_are_remembered_up_to_a_number() -> None:
    suspects = Suspects()
    for _ in range(MAX_DEATHS):
        suspects.engine_lost([submit("a")])
    with pytest.raises(PoisonRequest):
        suspects.check(submit("a"))
    suspects.engine_lost(
        Submit("x", pack_tokens([n]), SamplingParams()) for n in range(REMEMBERED_SUSPECTS)
    )
    suspects.check(submit("a"))


@with_engine
async def test_an_engine_that_gives_up_for_all_does_not_end_what_it_had_not_begun(
    client: Client,
) -> None:
    started, waiting = await open_requests(client, "a", "b")
    client.deliver(Started(["a"]))
    failed = [
        TokenDelta(id, finish="error", error_code=DeviceFailed.code, error_status=503)
        for id in "ab"
    ]
    say(client, *failed)
    assert await started == failed[:1]
    client.engine_lost("the device failed 3 steps in a row", knows_all=True)
    client.engine_ready(SentMessages())
    say(client, TokenDelta("b", [1], finish="stop"))
    assert await waiting == [TokenDelta("b", [1], finish="stop")]


@with_engine
async def test_nothing_is_taken_while_there_is_no_engine(client: Client) -> None:
    with pytest.raises(NotReady, match="being loaded"):
        await collect(OneEngine(), "a")
    client.engine_lost(LOST)
    for refused in (collect(client, "a"), client.status(), client.flush_cache()):
        with pytest.raises(NotReady, match="SIGKILL; another is being started"):
            await refused
    assert client.num_open == 0


@with_engine
async def test_draining_takes_nothing_new_and_waits_for_what_there_is(client: Client) -> None:
    first, last = await open_requests(client, "a", "b")
    client.drain()
    assert client.healthy
    with pytest.raises(NotReady, match="shutting down"):
        await collect(client, "c")
    drained = asyncio.create_task(client.drained())
    say(client, TokenDelta("a", [1], finish="stop"))
    assert [delta.tokens for delta in await first] == [[1]]
    say(client, TokenDelta("b", [1]))
    await asyncio.sleep(0)
    assert not drained.done()
    say(client, TokenDelta("b", [2], finish="stop"))
    assert [delta.tokens for delta in await last] == [[1], [2]]
    await drained


@with_engine
async def test_an_engine_that_is_lost_while_draining_ends_everything(client: Client) -> None:
    [waiting] = await open_requests(client, "a")
    client.drain()
    client.engine_lost(LOST)
    assert await waiting == [dead("a")]
    await client.drained()


@with_engine
async def test_closing_ends_everything(client: Client) -> None:
    [waiting] = await open_requests(client, "a")
    client.close()
    assert await waiting == [dead("a", "the server is shutting down")]
    with pytest.raises(NotReady, match="shutting down"):
        await collect(client, "b")


FIRST = TokenDelta(
    "a",
    [1],
    [TokenLogprobs(-1.0)],
    [TokenLogprobs(-9.0)],
    cached_tokens=7,
    host_tokens=3,
    disk_tokens=2,
    peer_tokens=1,
    queued_s=0.5,
)
SECOND = TokenDelta("a", [2, 3], [TokenLogprobs(-2.0), TokenLogprobs(-3.0)], accepted_drafts=1)
LAST = TokenDelta("a", [4], [TokenLogprobs(-4.0)], accepted_drafts=2, finish="length")


def read(deltas: Sequence[TokenDelta], num_reads: int) -> list[TokenDelta]:
    async def run() -> list[TokenDelta]:
        queue = DeltaQueue()
        for delta in deltas:
            queue.put(delta)
        return [await queue.get() for _ in range(num_reads)]

    return asyncio.run(run())


def test_what_has_arrived_is_one_delta_with_all_tokens_and_logprobs() -> None:
    (delta,) = read([FIRST, SECOND, LAST], 1)
    assert delta.tokens == [1, 2, 3, 4]
    assert [known.logprob for known in delta.logprobs or ()] == [-1.0, -2.0, -3.0, -4.0]
    assert (delta.cached_tokens, delta.host_tokens, delta.disk_tokens) == (7, 3, 2)
    assert delta.peer_tokens == 1
    assert (delta.queued_s, delta.prompt_logprobs) == (0.5, FIRST.prompt_logprobs)
    assert (delta.accepted_drafts, delta.finish) == (2, "length")


@pytest.mark.parametrize("finish", ["error", "abort"])
def test_tokens_before_a_failure_are_read_before_it(finish: str) -> None:
    failure = TokenDelta("a", finish=finish, error="lost")  # type: ignore[arg-type]
    tokens, failed = read([FIRST, SECOND, failure], 2)
    assert tokens.tokens == [1, 2, 3]
    assert tokens.finish is None
    assert failed is failure


def test_a_read_that_was_cancelled_loses_nothing() -> None:
    async def run() -> TokenDelta:
        queue = DeltaQueue()
        reading = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put(FIRST)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        queue.put(SECOND)
        return await queue.get()

    assert asyncio.run(run()).tokens == [1, 2, 3]
