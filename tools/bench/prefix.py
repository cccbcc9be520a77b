"""What the prefix cache saves, as clients of two servers see it, one of them without a cache.

Only one has work at a time. What the cache costs where it saves nothing is less than two processes
differ by: `features.py` measures it.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

from pippin.bench.client import LoadClient, TimedReply, parse
from pippin.bench.report import Report, say
from pippin.bench.serve import Count
from pippin.config import Config
from pippin.startup.checkpoint import find_checkpoint
from prompts import Prompts, count_with
from scenarios import PROMPT_TOKENS, REPLY_TOKENS, TURNS, fan_out, warm_server
from shared import ColdWarm, Names, Part, chat, cold_warm_table, report_parts, run

WARM_SHARE = 0.12  # of the cold time: what a known prompt may take


class PrefixBench:
    """The parts that are measured over a server with a cache and one without."""

    def __init__(self, config: Config, model_dir: Path, rounds: int, stack: ExitStack) -> None:
        """`stack`: ends the servers, which the first part starts."""
        self._config = replace(config, model=replace(config.model, model=str(model_dir)))
        self._count = count_with(model_dir)
        self._rounds = rounds
        self._stack = stack

    @cached_property
    def _clients(self) -> tuple[LoadClient, LoadClient]:
        say("starting two servers")
        clients = []
        for wanted in (True, False):
            engine = replace(self._config.engine, prefix_cache=wanted)
            server = warm_server(replace(self._config, engine=engine), self._count)
            clients.append(self._stack.enter_context(server))
        cached, uncached = clients
        return cached, uncached

    def repeat(self) -> Part:
        """The same prompt twice."""
        cached, _ = self._clients
        cold: list[TimedReply] = []
        warm: list[TimedReply] = []
        for turn in range(self._rounds):
            prompt = self._prompts("repeat", turn).text(PROMPT_TOKENS)
            for replies in (cold, warm):
                replies.append(parse(asyncio.run(cached.complete(prompt, max_tokens=1))))
        return _part([ColdWarm.of("the same prompt again", cold, warm)])

    def chat(self) -> Part:
        """Conversations that start near 2,000 tokens: each turn with and without a cache."""
        rounds = [self._conversation(number) for number in range(self._rounds)]
        # The first turn is new to both servers.
        return _part(
            [
                ColdWarm.of(f"chat, turn {turn + 1}", *zip(*(r[turn] for r in rounds), strict=True))
                for turn in range(1, TURNS)
            ]
        )

    def _conversation(self, number: int) -> list[tuple[TimedReply, TimedReply]]:
        """Every turn's cold and warm reply."""
        cached, uncached = self._clients
        prompts = self._prompts("chat", number)
        messages = [{"role": "system", "content": prompts.text(PROMPT_TOKENS - 100)}]
        turns = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": prompts.question()})
            warm, cold = (
                parse(asyncio.run(chat(client, messages, REPLY_TOKENS)))
                for client in (cached, uncached)
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
        return _part(
            [
                ColdWarm.of(f"{len(cold)} branches of a new prompt", cold, first),
                ColdWarm.of(f"{len(cold)} branches of a known prompt", cold, warm),
            ]
        )

    def _prompts(self, part: str, turn: int) -> Prompts:
        return Prompts(f"prefix {part} {turn}", self._count)


def prefix(config: Config, *, only: Names = None, rounds: Count = 3) -> Report:
    """Measure time to first token with and without the prefix cache.

    Parameters
    ----------
    only
        Parts to run: repeat, chat, fan-out. Default: all.
    rounds
        Number of prompts and conversations; the table shows medians.
    """
    model_dir = find_checkpoint(config.model)
    with ExitStack() as stack:
        bench = PrefixBench(config, model_dir, rounds, stack)
        parts = {"repeat": bench.repeat, "chat": bench.chat, "fan-out": bench.fan_out}
        return report_parts("prefix", parts, only or ())


def _part(rows: list[ColdWarm]) -> Part:
    table = cold_warm_table("Time to first token without and with the cache", rows, WARM_SHARE)
    return table, [asdict(row) for row in rows]


if __name__ == "__main__":
    run(prefix, "model", "engine", without=("prefix_cache",))
