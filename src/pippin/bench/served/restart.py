"""`pippin bench restart`: what a cache on disk saves after a restart, and what writing it costs.

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from pippin.amounts import parse_bytes
from pippin.bench.client.loads import Load, run_load
from pippin.bench.client.sse import TimedReply, parse
from pippin.bench.client.wire import LoadClient, Target
from pippin.bench.errors import BenchError
from pippin.bench.prompts import CountTokens, Prompts, count_with
from pippin.bench.results.report import Report, busy_note, say
from pippin.bench.results.samples import median, percentile
from pippin.bench.served.restart_report import Gaps, Restarted, SteadyLoad, summarize
from pippin.bench.served.scenarios import PROMPT_TOKENS, REPLY_TOKENS, interfere, warm_up
from pippin.bench.servers.processes import as_options, pippin_server
from pippin.config import Config

RESTARTS = ("sigterm", "kill")
PARTS = (*RESTARTS, "gaps", "ceilings")
DISK = "4GB"
SMALL_DISK = "32MB"
SETTLED_SECONDS = 1.0  # without a write: all is written
WRITE_SECONDS = 120.0
POLL_SECONDS = 0.1
QUESTION_TOKENS = 100  # of a conversation's prompt, about
STEADY_CLIENTS = 4
STEADY_PROMPT_TOKENS = 600


class RestartBench:
    def __init__(self, config: Config, model_dir: Path, count: CountTokens, rounds: int) -> None:
        self._config = replace(config, model=replace(config.model, model=str(model_dir)))
        self._count = count
        self._rounds = rounds

    def restart(self, how: str) -> Restarted:
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
        pairs = zip(cold, restored, strict=True)
        return Restarted(
            how=how,
            asked=len(asked),
            equal=sum(before.text == after.text for before, after in pairs),
            prompt_tokens=restored[0].prompt_tokens or 0,
            cached_tokens=int(median([reply.cached_tokens or 0 for reply in restored])),
            cold_ttft=median([reply.ttft for reply in cold]),
            restored_ttft=median([reply.ttft for reply in restored]),
            damaged=disk["store"]["damaged"],
            computed=disk["declined_loads"] + disk["late_loads"],
        )

    def gaps(self) -> Gaps:
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
        return Gaps(found[True], found[False])

    def ceilings(self, seconds: float, disk: str = SMALL_DISK) -> SteadyLoad:
        with (
            tempfile.TemporaryDirectory() as directory,
            self._server(directory, disk) as client,
        ):
            return asyncio.run(self._watch(client, Path(directory), seconds, disk))

    async def _watch(
        self, client: LoadClient, directory: Path, seconds: float, disk: str
    ) -> SteadyLoad:
        ends = time.monotonic() + seconds
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
        store = status["disk"]["store"]
        return SteadyLoad(
            seconds=seconds,
            disk_bytes=most_on_disk,
            max_disk_bytes=parse_bytes("disk", disk),
            claimed_bytes=most_claimed,
            budget_bytes=status["memory"]["budget_bytes"],
            written_bytes=store["written_bytes"],
            kept_bytes=store["kept_bytes"],
            evicted=store["evicted"],
            errors=await load,
        )

    async def _steady_load(self, client: LoadClient, ends: float) -> int:
        """New prompts all the time; returns how many requests failed."""
        errors = turn = 0
        load = Load("concurrency", STEADY_CLIENTS, 8, STEADY_PROMPT_TOKENS, REPLY_TOKENS)
        while time.monotonic() < ends:
            replies = await run_load(client, load, Prompts(f"steady {turn}", self._count))
            errors += len(replies.errors)
            turn += 1
        return errors

    @contextmanager
    def _server(
        self, directory: str | None, disk: str | None, *, killed: bool = False
    ) -> Iterator[LoadClient]:
        engine = replace(self._config.engine, cache_dir=directory, disk=disk)
        name, *options = as_options(replace(self._config, engine=engine))
        with pippin_server(name, options, killed=killed) as target:
            client = LoadClient(target)
            asyncio.run(warm_up(client, Prompts("warm-up", self._count)))
            yield client


def restart(
    config: Config,
    model_dir: Path,
    *,
    only: Sequence[str] = (),
    rounds: int = 3,
    seconds: float = 60.0,
) -> Report:
    if unknown := [name for name in only if name not in PARTS]:
        raise BenchError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if config.engine.cache_dir is not None:
        raise BenchError("directories are made for this and removed: leave --cache-dir away")
    chosen = [name for name in PARTS if not only or name in only]
    notes = busy_note()
    bench = RestartBench(config, model_dir, count_with(model_dir), rounds)
    restarted: list[Restarted] = []
    for how in (name for name in chosen if name in RESTARTS):
        say(f"measuring: {how}")
        restarted.append(bench.restart(how))
    gaps = ceilings = None
    if "gaps" in chosen:
        say("measuring: gaps")
        gaps = bench.gaps()
    if "ceilings" in chosen:
        say(f"measuring: ceilings, for {seconds:g} s")
        ceilings = bench.ceilings(seconds)
    return summarize(restarted, gaps, ceilings, notes)


def _conversation(prompts: Prompts) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": prompts.text(PROMPT_TOKENS - QUESTION_TOKENS)},
        {"role": "user", "content": prompts.question()},
    ]


def _ask(client: LoadClient, messages: list[dict[str, str]]) -> TimedReply:
    return parse(asyncio.run(client.chat(messages, max_tokens=REPLY_TOKENS)))


async def _begin_writing(client: LoadClient, prompts: Prompts) -> None:
    """Have prompts computed that nobody waits for; returns while they are being written."""
    before = _store(client.target)["written"]
    begun = [
        await client.start_completion(prompts.text(PROMPT_TOKENS), REPLY_TOKENS) for _ in range(3)
    ]
    ends = time.monotonic() + WRITE_SECONDS
    while _store(client.target)["written"] == before:
        if time.monotonic() > ends:
            raise BenchError(f"nothing was written within {WRITE_SECONDS:g} s")
        await asyncio.sleep(POLL_SECONDS / 10)
    for exchange in begun:
        exchange.hang_up()


def _wait_until_written(target: Target) -> None:
    """Until nothing has been written for a while."""
    ends = time.monotonic() + WRITE_SECONDS
    written, since = -1, time.monotonic()
    while time.monotonic() - since < SETTLED_SECONDS:
        if time.monotonic() > ends:
            raise BenchError(f"the server was still writing after {WRITE_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
        if (now := _store(target)["written"]) != written:
            written, since = now, time.monotonic()


def _store(target: Target) -> dict[str, int]:
    """The store's own counters."""
    store: dict[str, int] = _disk(target)["store"]
    return store


def _disk(target: Target) -> dict[str, Any]:
    """What `/status` says of it."""
    disk: dict[str, Any] | None = httpx.get(f"{target.url}/status", timeout=30).json()["disk"]
    if disk is None:
        raise BenchError("the server has no cache on disk")
    return disk


def _bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # removed meanwhile
            continue
    return total
