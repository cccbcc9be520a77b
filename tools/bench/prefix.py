"""What the prefix cache saves, as clients of two servers see it, one of them without a cache; and
what a cache on disk saves after a restart.

Only one server has work at a time.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx

from pippin.bench.client import LoadClient, Target, TimedReply, parse
from pippin.bench.report import BenchError, Report, say
from pippin.bench.serve import Count
from pippin.config import Config
from pippin.startup.checkpoint import find_checkpoint
from prompts import Prompts, count_with
from scenarios import PROMPT_TOKENS, REPLY_TOKENS, TURNS, fan_out, warm_server
from shared import Names, Part, chat, cold_warm, cold_warm_table, report_parts, run

WARM_SHARE = 0.12  # of the cold time: what a known prompt may take
RESTORED_SHARE = 0.10  # of the cold time: what a conversation may take after a restart
TITLE = "Time to first token without and with the cache"
HOW = {"sigterm": "SIGTERM", "kill": "kill -9 while writing"}
DISK = "4GB"
SETTLED_SECONDS = 1.0  # without a write: all is written
WRITE_SECONDS = 120.0
POLL_SECONDS = 0.1
QUESTION_TOKENS = 100  # of a conversation's prompt, about


class PrefixBench:
    def __init__(self, config: Config, model_dir: Path, rounds: int, stack: ExitStack) -> None:
        """`stack`: ends the servers with a cache and without, which the first part starts."""
        self._config = replace(config, model=replace(config.model, model=str(model_dir)))
        self._count = count_with(model_dir)
        self._rounds = rounds
        self._stack = stack

    @cached_property
    def _clients(self) -> tuple[LoadClient, LoadClient]:
        say("starting two servers")
        cached, uncached = (
            self._stack.enter_context(self._server(prefix_cache=wanted)) for wanted in (True, False)
        )
        return cached, uncached

    def _server(self, *, killed: bool = False, **engine: Any) -> AbstractContextManager[LoadClient]:
        config = replace(self._config, engine=replace(self._config.engine, **engine))
        return warm_server(config, self._count, killed=killed)

    def repeat(self) -> Part:
        """The same prompt twice."""
        cached, _ = self._clients
        sides: tuple[list[TimedReply], list[TimedReply]] = ([], [])
        for turn in range(self._rounds):
            prompt = self._prompts("repeat", turn).text(PROMPT_TOKENS)
            for replies in sides:
                replies.append(parse(asyncio.run(cached.complete(prompt, max_tokens=1))))
        return _part(TITLE, [cold_warm("the same prompt again", *sides)])

    def chat(self) -> Part:
        """Conversations that start near 2,000 tokens: each turn with and without a cache."""
        rounds = [self._conversation(number) for number in range(self._rounds)]
        rows = [
            cold_warm(f"chat, turn {turn + 1}", *zip(*(r[turn] for r in rounds), strict=True))
            for turn in range(1, TURNS)  # the first turn is new to both servers
        ]
        return _part(TITLE, rows)

    def _conversation(self, number: int) -> list[tuple[TimedReply, TimedReply]]:
        """Every turn's cold and warm reply."""
        cached, uncached = self._clients
        prompts = self._prompts("chat", number)
        messages = [{"role": "system", "content": prompts.text(PROMPT_TOKENS - QUESTION_TOKENS)}]
        turns = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": prompts.question()})
            warm, cold = (
                asyncio.run(chat(client, messages, REPLY_TOKENS)) for client in (cached, uncached)
            )
            messages.append({"role": "assistant", "content": warm.text})
            turns.append((cold, warm))
        return turns

    def fan_out(self) -> Part:
        """Branches of one prompt at once: of a new one, then of one that is cached."""
        cached, uncached = self._clients
        prompts = self._prompts("fan-out", 0)
        shared = prompts.text(PROMPT_TOKENS)
        cold, first, warm = (
            asyncio.run(fan_out(client, shared, prompts)) for client in (uncached, cached, cached)
        )
        rows = [
            cold_warm(f"{len(cold)} branches of a new prompt", cold, first),
            cold_warm(f"{len(cold)} branches of a known prompt", cold, warm),
        ]
        return _part(TITLE, rows)

    def restart(self, how: str) -> Part:
        """The same conversations on a server with a disk, and on another one after it."""
        asked = []
        for number in range(self._rounds):
            prompts = self._prompts(how, number)
            system = {"role": "system", "content": prompts.text(PROMPT_TOKENS - QUESTION_TOKENS)}
            asked.append([system, {"role": "user", "content": prompts.question()}])
        with tempfile.TemporaryDirectory() as directory:
            server = partial(self._server, cache_dir=directory, disk=DISK)
            with server(killed=how == "kill") as client:
                cold = [asyncio.run(chat(client, messages, REPLY_TOKENS)) for messages in asked]
                _wait_until_written(client.target)
                if how == "kill":
                    asyncio.run(_begin_writing(client, self._prompts("kill", -1)))
            with server() as client:
                restored = [asyncio.run(chat(client, messages, REPLY_TOKENS)) for messages in asked]
                found = _disk(client.target)
        equal = sum(a.text == b.text for a, b in zip(cold, restored, strict=True))
        name, numbers = cold_warm(
            f"{HOW[how]}, {equal} of {len(asked)} replies the same", cold, restored
        )
        numbers |= {
            "equal": equal,
            "damaged": found["store"]["damaged"],  # pieces of files
            "computed": found["declined_loads"] + found["late_loads"],  # though they were on disk
        }
        return _part("Time to first token after a restart", [(name, numbers)], RESTORED_SHARE)

    def _prompts(self, part: str, turn: int) -> Prompts:
        return Prompts(f"prefix {part} {turn}", self._count)


def _part(title: str, rows: list[tuple[str, dict[str, Any]]], most: float = WARM_SHARE) -> Part:
    return cold_warm_table(title, rows, most), [{"name": name, **found} for name, found in rows]


async def _begin_writing(client: LoadClient, prompts: Prompts) -> None:
    """Have prompts computed whose replies are not read; returns while they are being written."""
    before = _written(client.target)
    begun = [
        await client.start_completion(prompts.text(PROMPT_TOKENS), REPLY_TOKENS) for _ in range(3)
    ]
    ends = time.monotonic() + WRITE_SECONDS
    while _written(client.target) == before:
        if time.monotonic() > ends:
            raise BenchError(f"nothing was written within {WRITE_SECONDS:g} s")
        await asyncio.sleep(POLL_SECONDS / 10)
    for exchange in begun:
        exchange.disconnect()


def _wait_until_written(target: Target) -> None:
    """Until nothing has been written for a while."""
    ends = time.monotonic() + WRITE_SECONDS
    written, since = -1, time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        if time.monotonic() > ends:
            raise BenchError(f"the server was still writing after {WRITE_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
        if (now := _written(target)) != written:
            written, since = now, time.monotonic()


def _disk(target: Target) -> dict[str, Any]:
    disk: dict[str, Any] | None = httpx.get(f"{target.url}/status", timeout=30).json()["disk"]
    if disk is None:
        raise BenchError("the server has no cache on disk")
    return disk


def _written(target: Target) -> int:
    return int(_disk(target)["store"]["written"])


def prefix(config: Config, *, only: Names = None, rounds: Count = 3) -> Report:
    """Measure time to first token with and without the prefix cache, and after a restart from disk.

    sigterm, kill: the same conversations before and after a restart, in temporary directories.

    Parameters
    ----------
    only
        Parts to run: repeat, chat, fan-out, sigterm, kill. Default: all.
    rounds
        Number of prompts and conversations; the table shows medians.
    """
    model_dir = find_checkpoint(config.model)
    with ExitStack() as stack:
        bench = PrefixBench(config, model_dir, rounds, stack)
        parts = {"repeat": bench.repeat, "chat": bench.chat, "fan-out": bench.fan_out}
        parts |= {how: partial(bench.restart, how) for how in HOW}
        return report_parts("prefix", parts, only)


if __name__ == "__main__":
    run(prefix, "model", "engine", without=("prefix_cache", "cache_dir", "disk"))
