"""`pippin bench prefix`: what the prefix cache saves, and what it costs when it saves nothing.

What it saves is seen by clients of two servers, one with --no-prefix-cache, of which only one has
work at a time. What it costs is less than two processes differ by: see `in_process/cost.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pippin.bench.client.sse import TimedReply, parse
from pippin.bench.client.wire import LoadClient, Target
from pippin.bench.errors import BenchError
from pippin.bench.in_process.cost import Cost, cache_cost
from pippin.bench.kernels import build_kernels
from pippin.bench.prompts import CountTokens, Prompts, count_with
from pippin.bench.results.plot import Bar, Bars, Goal
from pippin.bench.results.report import Report, Table, busy_note, number, say
from pippin.bench.results.samples import median
from pippin.bench.served.scenarios import PROMPT_TOKENS, REPLY_TOKENS, TURNS, fan_out, warm_up
from pippin.bench.servers.processes import as_options, pippin_server
from pippin.config import Config

SERVED_PARTS = ("repeat", "chat", "fan-out")
PARTS = (*SERVED_PARTS, "cost")
WARM_SHARE = 0.12  # of the cold time: what a known prompt may take


@dataclass(frozen=True)
class Pair:
    """One situation without and with the cache. TTFT in seconds, medians over rounds."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    cold_ttft: float
    warm_ttft: float

    @property
    def share(self) -> float:
        return self.warm_ttft / self.cold_ttft


class PrefixBench:
    """The parts of the benchmark, over a server with a cache and one without."""

    def __init__(
        self, cached: LoadClient, uncached: LoadClient, count: CountTokens, rounds: int
    ) -> None:
        self._cached = cached
        self._uncached = uncached
        self._count = count
        self._rounds = rounds

    def repeat(self) -> list[Pair]:
        """The same prompt twice."""
        runs = [self._prompts("repeat", turn).text(PROMPT_TOKENS) for turn in range(self._rounds)]
        cold, warm = [], []
        for prompt in runs:
            cold.append(asyncio.run(self._first_token(self._cached, prompt)))
            warm.append(asyncio.run(self._first_token(self._cached, prompt)))
        return [_pair("the same prompt again", cold, warm)]

    def chat(self) -> list[Pair]:
        """Conversations that start near 2,000 tokens: each turn with and without a cache."""
        rounds = [self._conversation(number) for number in range(self._rounds)]
        # Nobody has seen a first turn before.
        return [
            _pair(
                f"chat, turn {turn + 1}", [r[turn][0] for r in rounds], [r[turn][1] for r in rounds]
            )
            for turn in range(1, TURNS)
        ]

    def _conversation(self, number: int) -> list[tuple[TimedReply, TimedReply]]:
        """Every turn's cold and warm reply."""
        prompts = self._prompts("chat", number)
        messages = [{"role": "system", "content": prompts.text(PROMPT_TOKENS - 100)}]
        turns = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": prompts.question()})
            warm = asyncio.run(self._answer(self._cached, messages))
            cold = asyncio.run(self._answer(self._uncached, messages))
            messages.append({"role": "assistant", "content": warm.text})
            turns.append((cold, warm))
        return turns

    def fan_out(self) -> list[Pair]:
        """Branches of one prompt at once: of one nobody has seen, then of one that is cached."""
        prompts = self._prompts("fan-out", 0)
        shared = prompts.text(PROMPT_TOKENS)
        cold = asyncio.run(fan_out(self._uncached, shared, prompts))
        first = asyncio.run(fan_out(self._cached, shared, prompts))
        warm = asyncio.run(fan_out(self._cached, shared, prompts))
        return [
            _pair(f"{len(cold)} branches of a new prompt", cold, first),
            _pair(f"{len(cold)} branches of a known prompt", cold, warm),
        ]

    def _prompts(self, part: str, turn: int) -> Prompts:
        return Prompts(f"prefix {part} {turn}", self._count)

    async def _first_token(self, client: LoadClient, prompt: str) -> TimedReply:
        return parse(await client.complete(prompt, max_tokens=1))

    async def _answer(self, client: LoadClient, messages: list[dict[str, str]]) -> TimedReply:
        return parse(await client.chat(messages, max_tokens=REPLY_TOKENS))


def prefix(
    config: Config,
    model_dir: Path,
    *,
    only: Sequence[str] = (),
    rounds: int = 3,
    num_pairs: int = 12,
) -> Report:
    if unknown := [name for name in only if name not in PARTS]:
        raise BenchError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if not config.engine.prefix_cache:
        raise BenchError("the cache is measured with and without it: leave --no-prefix-cache away")
    chosen = [name for name in PARTS if name in only] if only else list(PARTS)
    notes = busy_note()
    served = [name for name in chosen if name in SERVED_PARTS]
    pairs = _measure_served(config, model_dir, served, rounds) if served else []
    cost = None
    if "cost" in chosen:
        cost = cache_cost(config, prompt_tokens=PROMPT_TOKENS, num_pairs=num_pairs)
    return summarize(pairs, cost, notes)


def _measure_served(
    config: Config, model_dir: Path, parts: Sequence[str], rounds: int
) -> list[Pair]:
    pairs: list[Pair] = []
    with ExitStack() as stack:
        if config.model.backend not in ("fake", "torch"):
            build_kernels(str(model_dir), config.model.dtype)
        say("starting two servers")
        cached, uncached = (
            LoadClient(stack.enter_context(_server(config, model_dir, prefix_cache=wanted)))
            for wanted in (True, False)
        )
        count = count_with(model_dir)
        for client in (cached, uncached):
            asyncio.run(warm_up(client, Prompts("warm-up", count)))
        bench = PrefixBench(cached, uncached, count, rounds)
        for name in parts:
            say(f"measuring: {name}")
            pairs += getattr(bench, name.replace("-", "_"))()
    return pairs


def _server(
    config: Config, model_dir: Path, *, prefix_cache: bool
) -> AbstractContextManager[Target]:
    engine = replace(config.engine, prefix_cache=prefix_cache)
    model = replace(config.model, model=str(model_dir))
    name, *options = as_options(Config(model, engine))
    return pippin_server(name, options)


def summarize(pairs: list[Pair], cost: Cost | None, notes: list[str]) -> Report:
    data = [{**asdict(pair), "share": pair.share} for pair in pairs]
    report = Report("prefix", [], [], {"pairs": data}, notes)
    if pairs:
        report = replace(report, tables=[_table(pairs)], charts=[_chart(pairs)])
    if cost is None:
        return report
    return replace(
        report,
        tables=[*report.tables, cost.table],
        charts=[*report.charts, cost.chart],
        data={**report.data, "cost": cost.as_dict()},
    )


def _table(pairs: list[Pair]) -> Table:
    rows: list[tuple[str, ...]] = [
        (
            pair.name,
            f"{pair.prompt_tokens:,}",
            f"{pair.cached_tokens:,}",
            number(pair.cold_ttft * 1e3),
            number(pair.warm_ttft * 1e3),
            f"{pair.share:.1%}",
        )
        for pair in pairs
    ]
    header = ("situation", "prompt", "cached", "cold TTFT, ms", "warm TTFT, ms", "warm / cold")
    title = (
        f"Time to the first token, without and with the cache (target: at most {WARM_SHARE:.0%})"
    )
    return Table(title, header, rows)


def _chart(pairs: list[Pair]) -> Bars:
    rows = [
        Bar(
            pair.name,
            (pair.share * 100,),
            f"{number(pair.warm_ttft * 1e3)} of {number(pair.cold_ttft * 1e3)} ms",
        )
        for pair in pairs
    ]
    return Bars(
        "Time to the first token with the cache, as a share of without",
        "% of the cold time",
        ("warm / cold",),
        rows,
        unit="%",
        target=Goal(WARM_SHARE * 100, f"target: at most {WARM_SHARE:.0%}"),
    )


def _pair(name: str, cold: Sequence[TimedReply], warm: Sequence[TimedReply]) -> Pair:
    return Pair(
        name=name,
        prompt_tokens=warm[0].prompt_tokens or 0,
        cached_tokens=int(median([reply.cached_tokens or 0 for reply in warm])),
        cold_ttft=median([reply.ttft for reply in cold]),
        warm_ttft=median([reply.ttft for reply in warm]),
    )
