"""What a cache on disk saves after a restart, and what writing it costs.

sigterm    conversations, SIGTERM, another server on the same directory, the same ones again
kill       the same, with kill -9 while other prompts are being written
gaps       running streams while prompts arrive, on a server that writes them and one that
           does not, in turn
ceilings   a steady load of new prompts on a server whose disk is too small for them
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from pippin.amounts import parse_bytes
from pippin.bench.client import (
    Load,
    LoadClient,
    RequestSizes,
    Target,
    TimedReply,
    parse,
    send_load,
    summarize_load,
)
from pippin.bench.report import BenchError, Report, Table, percentile, ratio
from pippin.bench.serve import Count
from pippin.config import Config
from pippin.startup.checkpoint import find_checkpoint
from prompts import Prompts, count_with
from scenarios import PROMPT_TOKENS, REPLY_TOKENS, interfere, warm_server
from shared import (
    ColdWarm,
    Compared,
    Names,
    Pairs,
    Part,
    Positive,
    chat,
    cold_warm_table,
    pairs_table,
    report_parts,
    run,
)

HOW = {"sigterm": "SIGTERM", "kill": "kill -9 while writing"}
RESTORED_SHARE = 0.10  # of the cold time: what a conversation may take after a restart
GAP_RATIO = 1.10  # p99 of gaps while writing, over the same without
DISK = "4GB"
SMALL_DISK = "32MB"
SETTLED_SECONDS = 1.0  # without a write: all is written
WRITE_SECONDS = 120.0
POLL_SECONDS = 0.1
QUESTION_TOKENS = 100  # of a conversation's prompt, about
STEADY_CLIENTS = 4
STEADY_PROMPT_TOKENS = 600


class RestartBench:
    def __init__(self, config: Config, model_dir: Path, rounds: int, seconds: float) -> None:
        self._config = replace(config, model=replace(config.model, model=str(model_dir)))
        self._count = count_with(model_dir)
        self._rounds = rounds
        self._seconds = seconds  # of the steady load

    def restart(self, how: str) -> Part:
        """The same conversations on a server, and on another one after it."""
        prompts = Prompts(f"restart {how}", self._count)
        asked = [_conversation(prompts) for _ in range(self._rounds)]
        with tempfile.TemporaryDirectory() as directory:
            with self._server(directory, DISK, killed=how == "kill") as client:
                cold = [_ask(client, messages) for messages in asked]
                _wait_until_written(client.target)
                if how == "kill":
                    asyncio.run(_begin_writing(client, prompts))
            with self._server(directory, DISK) as client:
                restored = [_ask(client, messages) for messages in asked]
                disk = _disk(client.target)
        equal = sum(a.text == b.text for a, b in zip(cold, restored, strict=True))
        row = ColdWarm.of(f"{HOW[how]}, {equal} of {len(asked)} replies the same", cold, restored)
        data = {
            **asdict(row),
            "asked": len(asked),
            "equal": equal,
            "damaged": disk["store"]["damaged"],  # pieces of files
            "computed": disk["declined_loads"] + disk["late_loads"],  # though they were on disk
        }
        return cold_warm_table("Time to first token after a restart", [row], RESTORED_SHARE), data

    def gaps(self) -> Part:
        """99th percentiles of the gaps between a stream's tokens, one of each round."""
        found: dict[bool, list[float]] = {True: [], False: []}
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            writing = stack.enter_context(self._server(directory, DISK))
            plain = stack.enter_context(self._server(None, None))
            for turn in range(self._rounds):
                for client in (writing, plain) if turn % 2 else (plain, writing):
                    prompts = Prompts(f"gaps {turn}", self._count)
                    gaps = asyncio.run(interfere(client, prompts)).busy_gaps
                    found[client is writing].append(percentile(gaps, 0.99))
                    if client is writing:
                        _wait_until_written(writing.target)
        pairs = Pairs(found[True], found[False])
        row = Compared("p99 gap, ms", pairs, 1e3, at_most=GAP_RATIO)
        title = "Gaps of running streams while prompts arrive"
        return pairs_table(title, "writing", "no disk", [row]), pairs.as_dict()

    def ceilings(self, disk: str = SMALL_DISK) -> Part:
        with tempfile.TemporaryDirectory() as directory, self._server(directory, disk) as client:
            return asyncio.run(self._watch(client, Path(directory), disk))

    async def _watch(self, client: LoadClient, directory: Path, disk: str) -> Part:
        """The most bytes under a steady load, and the limits."""
        ends = time.monotonic() + self._seconds
        load = asyncio.create_task(self._steady_load(client, ends))
        most_on_disk = most_claimed = 0
        status: dict[str, Any] = {}
        async with httpx.AsyncClient(base_url=client.target.url, timeout=30) as http:
            while not load.done():
                status = (await http.get("/status")).json()
                claimed = status["memory"]["claimed_bytes"] + status["cache"]["nbytes"]
                most_claimed = max(most_claimed, claimed)
                most_on_disk = max(most_on_disk, _bytes_in(directory))
                await asyncio.sleep(POLL_SECONDS)
        errors = await load
        store = status["disk"]["store"]
        limits = {
            "bytes on disk": (most_on_disk, parse_bytes("disk", disk)),
            "bytes in memory": (most_claimed, status["memory"]["budget_bytes"]),
            "bytes written, of those kept": (store["written_bytes"], store["kept_bytes"]),
        }
        title = f"{self._seconds:g} s of new prompts: {store['evicted']:,} evicted, {errors} failed"
        table = Table(
            title,
            ("", "most", "allowed", "share"),
            [
                (name, f"{most:,}", f"{allowed:,}", f"{ratio(most, allowed):.1%}")
                for name, (most, allowed) in limits.items()
            ],
        )
        return table, {**limits, "evicted": store["evicted"], "errors": errors}

    async def _steady_load(self, client: LoadClient, ends: float) -> int:
        """New prompts all the time; returns how many requests failed."""
        errors = turn = 0
        sizes = RequestSizes(8, STEADY_PROMPT_TOKENS, REPLY_TOKENS)
        while time.monotonic() < ends:
            requests = sizes.requests(Prompts(f"steady {turn}", self._count).text)
            sent = await send_load(client, Load(STEADY_CLIENTS), requests)
            errors += summarize_load(sent).num_errors
            turn += 1
        return errors

    def _server(
        self, directory: str | None, disk: str | None, *, killed: bool = False
    ) -> AbstractContextManager[LoadClient]:
        engine = replace(self._config.engine, cache_dir=directory, disk=disk)
        return warm_server(replace(self._config, engine=engine), self._count, killed=killed)


def restart(
    config: Config, *, only: Names = None, rounds: Count = 3, seconds: Positive = 60.0
) -> Report:
    """Measure what a cache on disk saves after a restart, and what writing it costs.

    Runs conversations of 2,000 tokens without a cache, then again after SIGTERM, and after kill -9
    while others were being written. It uses temporary directories.

    Parameters
    ----------
    only
        Parts to run: sigterm, kill, gaps, ceilings. Default: all.
    rounds
        Number of conversations, and of pairs of runs with streams; the table shows medians.
    seconds
        Seconds during which new prompts are sent in part `ceilings`.
    """
    if config.engine.cache_dir is not None:
        raise BenchError("this benchmark makes its own directories: remove --cache-dir")
    bench = RestartBench(config, find_checkpoint(config.model), rounds, seconds)
    parts: dict[str, Callable[[], Part]] = {
        **{how: partial(bench.restart, how) for how in HOW},
        "gaps": bench.gaps,
        "ceilings": bench.ceilings,
    }
    return report_parts("restart", parts, only or ())


def _conversation(prompts: Prompts) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": prompts.text(PROMPT_TOKENS - QUESTION_TOKENS)},
        {"role": "user", "content": prompts.question()},
    ]


def _ask(client: LoadClient, messages: list[dict[str, str]]) -> TimedReply:
    return parse(asyncio.run(chat(client, messages, REPLY_TOKENS)))


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


def _bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # removed meanwhile
            continue
    return total


if __name__ == "__main__":
    run(restart, "model", "engine", without=("cache_dir", "disk"))
