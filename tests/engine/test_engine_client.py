"""Requests on engines that come and go. The engines here are lists of what was sent to them."""

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
from pippin.errors import DeviceFailed, EngineDead, NotReady, PippinError, PoisonRequest
from pippin.messages import (
    Abort,
    Answer,
    Compiled,
    FlushCache,
    GetStatus,
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


class SentMessages(list[ToEngine]):
    """What an engine was sent."""

    alive = True

    def send(self, message: ToEngine) -> None:
        self.append(message)


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
