"""The engine's half of the channel, in this process: how it starts and what it says at its end."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders import make_loop
from bundled import BUNDLED_PATH
from one_engine import OneEngine
from pippin.backends.base import PendingStep, StepPlan
from pippin.cache.tree.canary import Canary
from pippin.config import Config
from pippin.engine.engine_spec import EngineSpec
from pippin.engine.run import Channel, MessagePump, run_engine
from pippin.errors import PippinError
from pippin.messages import (
    Abort,
    Alive,
    Answer,
    Failed,
    FromEngine,
    Shutdown,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
    pack_tokens,
)
from pippin.scheduler.loop import Loop
from pippin.supervision import Connection
from pippin.types import SamplingParams
from processes import PATIENCE_SECONDS, environment


async def ask(engine: OneEngine, id: str, prompt: list[int]) -> TokenDelta:
    """The terminal delta."""
    submit = Submit(id, pack_tokens(prompt), SamplingParams(max_tokens=2, temperature=0.0))
    return [delta async for delta in engine.generate(submit)][-1]


Scenario = Callable[[OneEngine], Coroutine[Any, Any, None]]


async def listen(connection: Connection, engine: OneEngine, signs: list[Alive]) -> None:
    while not isinstance(message := await connection.receive(), Failed):
        if isinstance(message, Alive):
            signs.append(message)
        if isinstance(message, TokenBatch | Started | Answer):
            engine.deliver(message)
    engine.engine_lost(message.message, knows_all=True)


async def loss_of(engine: OneEngine) -> str:
    while (reason := engine.reason) is None:
        await asyncio.sleep(0.01)
    return reason


def talk_to(
    loop: Loop, socket_dir: Path, scenario: Scenario, signs: list[Alive] | None = None
) -> int:
    """Run the loop as an engine beside a server that follows the scenario; the exit status."""
    spec = EngineSpec(Config(), str(socket_dir))
    statuses: list[int] = []

    def run() -> None:
        channel = Channel(spec)
        statuses.append(run_engine(loop, channel))
        channel.close()

    async def work() -> None:
        connection, engine = Connection(spec.inbox, spec.outbox), OneEngine()
        engine.engine_ready(connection)
        listening = asyncio.create_task(listen(connection, engine, [] if signs is None else signs))
        try:
            await scenario(engine)
        finally:
            listening.cancel()
            connection.send(Shutdown())
            # What is closed says what it still has to say within a moment, or not at all.
            await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
            connection.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    asyncio.run(asyncio.wait_for(work(), 2 * PATIENCE_SECONDS))
    (status,) = statuses
    return status


def test_a_fault_found_by_a_raising_canary_is_why_the_engine_stopped(tmp_path: Path) -> None:
    loop = make_loop(canary=Canary("raise"))
    cache = loop.scheduler.cache
    assert cache is not None

    async def scenario(engine: OneEngine) -> None:
        prompt = list(range(80))
        assert (await ask(engine, "a", prompt)).finish == "length"
        node = next(iter(cache.radix.root.children.values()))
        assert node.path_hash is not None
        node.path_hash ^= 1
        waiting = asyncio.create_task(ask(engine, "b", [*prompt, 1]))
        assert (await loss_of(engine)).startswith(
            "the engine stopped: cache entry over tokens [0, "
        )
        assert not waiting.done()  # nothing was computed of it: another engine may
        engine.close()
        await waiting

    assert talk_to(loop, tmp_path, scenario) == 1


@pytest.mark.parametrize("question", ["status", "counters", "flush_cache"])
def test_a_question_that_cannot_be_answered_harms_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    loop = make_loop()
    monkeypatch.setattr(loop, question, lambda *_: {}["nothing"])

    async def scenario(engine: OneEngine) -> None:
        running = asyncio.create_task(ask(engine, "a", list(range(80))))
        with pytest.raises(PippinError, match=r"could not answer.*nothing") as info:
            await getattr(engine, question)()
        assert info.value.status == 500
        assert (await running).finish == "length"
        assert engine.healthy

    assert talk_to(loop, tmp_path, scenario) == 0


def test_an_engine_whose_device_is_gone_tells_its_requests_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop()
    step = loop.step

    def last_step() -> list[TokenDelta]:
        deltas = step()
        loop.failure = PippinError("the device failed 5 steps in a row")
        return [*deltas, TokenDelta("a", finish="error", error="the device failed")]

    monkeypatch.setattr(loop, "step", last_step)

    async def scenario(engine: OneEngine) -> None:
        assert (await ask(engine, "a", [1, 2, 3])).error == "the device failed"
        assert (await loss_of(engine)).startswith(
            "the engine stopped: the device failed 5 steps in a row"
        )

    assert talk_to(loop, tmp_path, scenario) == 1


def submit(id: str, max_tokens: int) -> Submit:
    return Submit(
        id, pack_tokens([1, 2, 3]), SamplingParams(max_tokens=max_tokens, temperature=0.0)
    )


def test_messages_that_arrive_while_others_are_read_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = Channel(EngineSpec(Config(), str(tmp_path)))
    ids = iter(range(100))
    decode = channel._decoder.decode

    def deliver_two() -> None:
        for id in itertools.islice(ids, 2):
            channel.deliver(Abort(str(id)))

    def decode_while_more_arrive(frame: bytes) -> ToEngine:
        message = decode(frame)
        if int(message.id) % 2:  # the last that was waiting
            deliver_two()
        return message

    decoder = SimpleNamespace(decode=decode_while_more_arrive)
    monkeypatch.setattr(channel, "_decoder", decoder)
    deliver_two()
    received: list[ToEngine] = []
    while len(received) < 100:
        received += channel.receive(PATIENCE_SECONDS)
    assert received == [Abort(str(number)) for number in range(100)]
    channel.close()
    channel.deliver(Abort("late"))  # a thread that ends after the channel


class ScriptedChannel:
    """Brings what it is told to, then a Shutdown; keeps what is sent."""

    def __init__(self, *rounds: list[ToEngine]) -> None:
        self._rounds = [*rounds, [Shutdown()]]
        self.sent: list[FromEngine] = []
        self.waits: list[bool] = []

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        self.waits.append(wait_seconds > 0)
        return self._rounds.pop(0)

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def test_an_engine_waits_for_messages_only_while_it_has_nothing_to_do() -> None:
    channel = ScriptedChannel([], [submit("a", 1)], [], [], [], [])
    MessagePump(make_loop(cache=False), channel).run()  # type: ignore[arg-type]
    assert channel.waits[:3] == [True, True, False]
    assert channel.waits[-1]


def test_signs_of_life_come_while_a_step_runs_and_say_how_long_it_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin.engine.run.BEAT_SECONDS", 0.01)
    loop, signs = make_loop(cache=False), list[Alive]()
    step, goes_on = loop.step, threading.Event()

    def long_step() -> list[TokenDelta]:
        assert goes_on.wait(PATIENCE_SECONDS)
        return step()

    monkeypatch.setattr(loop, "step", long_step)

    async def scenario(engine: OneEngine) -> None:
        running = asyncio.create_task(ask(engine, "a", [1, 2, 3]))
        while not signs or signs[-1].turn_seconds < 0.2:
            await asyncio.sleep(0.01)
        assert not running.done()
        goes_on.set()
        assert (await running).finish == "length"
        while signs[-1].turn_seconds >= 0.2:
            await asyncio.sleep(0.01)

    assert talk_to(loop, tmp_path, scenario, signs) == 0


def test_an_engine_tells_that_a_request_starts_before_it_computes_anything() -> None:
    channel = ScriptedChannel([submit("a", 8), submit("b", 1)], *([] for _ in range(50)))
    loop = make_loop(cache=False, num_slots=1)
    launched: list[list[FromEngine]] = []
    launch = loop.backend.launch

    def noted(plan: StepPlan) -> PendingStep:
        launched.append(list(channel.sent))
        return launch(plan)

    loop.backend.launch = noted  # type: ignore[method-assign]
    MessagePump(loop, channel).run()  # type: ignore[arg-type]
    assert launched[0] == [Started(["a"])]
    ends = [
        message
        for message in channel.sent
        if isinstance(message, Started)
        or (isinstance(message, TokenBatch) and any(delta.finish for delta in message.deltas))
    ]
    assert [type(message) for message in ends] == [Started, TokenBatch, Started, TokenBatch]
    assert ends[2] == Started(["b"])


WATCHED_ENGINE = """
import sys
from pippin.config import Config, ModelConfig
from pippin.engine.build_loop import build_loop
from pippin.engine.run import MessagePump
from pippin.messages import FeedMessage, Shutdown, Submit, TokenBatch, Watch, pack_tokens
from pippin.types import SamplingParams

class Channel:
    def __init__(self):
        self.sent = []
        self.inbox = [Watch(), Submit("a", pack_tokens([1, 2, 3]), SamplingParams(max_tokens=4))]

    def send(self, message):
        self.sent.append(message)

    def receive(self, wait_seconds):
        done = {type(message) for message in self.sent} >= {TokenBatch, FeedMessage}
        arrived, self.inbox = self.inbox, [Shutdown()] if done else []
        return arrived

loop = build_loop(Config(ModelConfig(model=sys.argv[1], backend="fake")), print, stays=True)
MessagePump(loop, Channel()).run()
loop.close()
print(*sorted(name for name in sys.modules if name.startswith("pippin.")))
"""


def test_an_engine_that_runs_and_is_watched_imports_no_server_page_or_benchmark() -> None:
    command = [sys.executable, "-c", WATCHED_ENGINE, str(BUNDLED_PATH)]
    printed = subprocess.check_output(command, env=environment(), text=True)
    loaded = printed.splitlines()[-1].split()
    assert "pippin.engine.events.event_sender" in loaded
    packages = {name.split(".")[1] for name in loaded}
    assert not packages & {
        *("api", "bench", "cli", "offline", "service", "startup", "supervision", "terminal")
    }
