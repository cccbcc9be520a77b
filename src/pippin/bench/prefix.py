"""`pippin bench prefix`: what the prefix cache saves, and what it costs when it saves nothing.

Two servers of the same model, one with --no-prefix-cache; only one has work at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from pippin.bench.plot import Bars
from pippin.bench.prompts import CountTokens, Prompts, count_with
from pippin.bench.report import Report, Table, busy_note, number, say
from pippin.bench.samples import median
from pippin.bench.scenarios import PROMPT_TOKENS, REPLY_TOKENS, TURNS, fan_out, warm_up
from pippin.bench.servers import pippin_server
from pippin.bench.sse import Reply, parse
from pippin.bench.wire import BenchError, Client

PARTS = ("repeat", "chat", "fan-out", "cost")


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


@dataclass(frozen=True)
class Cost:
    """TTFT in seconds of cold prompts, round by round, with and without a cache to fill."""

    cached: list[float]
    uncached: list[float]

    @property
    def overhead(self) -> float:
        """The median over rounds of the extra share; neighbours in time are compared."""
        return median([on / off - 1 for on, off in zip(self.cached, self.uncached, strict=True)])


class PrefixBench:
    """The parts of the benchmark, over a server with a cache and one without."""

    def __init__(self, cached: Client, uncached: Client, count: CountTokens, rounds: int) -> None:
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
        """A conversation that starts near 2,000 tokens: each turn with and without a cache."""
        prompts = self._prompts("chat", 0)
        messages = [{"role": "system", "content": prompts.text(PROMPT_TOKENS - 100)}]
        pairs = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": prompts.question()})
            warm = asyncio.run(self._answer(self._cached, messages))
            cold = asyncio.run(self._answer(self._uncached, messages))
            messages.append({"role": "assistant", "content": warm.text})
            if turn > 0:  # nobody has seen the first turn before
                pairs.append(_pair(f"chat, turn {turn + 1}", [cold], [warm]))
        return pairs

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

    def cost(self) -> Cost:
        """Prompts that share nothing, on both servers in turn."""
        cached: list[float] = []
        uncached: list[float] = []
        for turn in range(max(3, self._rounds)):
            sides = [(self._cached, cached), (self._uncached, uncached)]
            prompt = self._prompts("cost", turn).text(PROMPT_TOKENS)
            for client, ttfts in reversed(sides) if turn % 2 else sides:
                reply = asyncio.run(self._first_token(client, prompt))
                ttfts.append(reply.ttft)
        return Cost(cached, uncached)

    def _prompts(self, part: str, turn: int) -> Prompts:
        return Prompts(f"prefix {part} {turn}", self._count)

    async def _first_token(self, client: Client, prompt: str) -> Reply:
        return parse(await client.complete(prompt, max_tokens=1))

    async def _answer(self, client: Client, messages: list[dict[str, str]]) -> Reply:
        return parse(await client.chat(messages, max_tokens=REPLY_TOKENS))


def prefix(
    model_dir: Path, *, only: Sequence[str] = (), rounds: int = 3, options: Sequence[str] = ()
) -> Report:
    if unknown := [name for name in only if name not in PARTS]:
        raise BenchError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    notes = busy_note()
    pairs: list[Pair] = []
    cost: Cost | None = None
    with ExitStack() as stack:
        say("starting two servers")
        model = str(model_dir)
        cached = Client(stack.enter_context(pippin_server(model, options)))
        uncached = Client(
            stack.enter_context(pippin_server(model, [*options, "--no-prefix-cache"]))
        )
        count = count_with(model_dir)
        for client in (cached, uncached):
            asyncio.run(warm_up(client, Prompts("warm-up", count)))
        bench = PrefixBench(cached, uncached, count, rounds)
        for name in only or PARTS:
            say(f"measuring: {name}")
            match name:
                case "repeat":
                    pairs += bench.repeat()
                case "chat":
                    pairs += bench.chat()
                case "fan-out":
                    pairs += bench.fan_out()
                case "cost":
                    cost = bench.cost()
    return summarize(pairs, cost, notes)


def summarize(pairs: list[Pair], cost: Cost | None, notes: list[str]) -> Report:
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
    tables = [Table("Time to the first token, without and with the cache", header, rows)]
    charts = [
        Bars(
            "Time to the first token",
            ("warm", "cold"),
            [(pair.name, (pair.warm_ttft * 1e3, pair.cold_ttft * 1e3)) for pair in pairs],
            unit="ms",
        )
    ]
    data: dict[str, object] = {"pairs": [{**asdict(pair), "share": pair.share} for pair in pairs]}
    if cost is not None:
        row = (
            f"{len(cost.cached)} new prompts of {PROMPT_TOKENS:,} tokens, in turn",
            number(median(cost.cached) * 1e3),
            number(median(cost.uncached) * 1e3),
            f"{cost.overhead:+.1%}",
        )
        cost_header = ("cost on cold prompts", "cache on, ms", "cache off, ms", "median of pairs")
        tables.append(Table("What the cache costs where it cannot help", cost_header, [row]))
        data["cost"] = {**asdict(cost), "overhead": cost.overhead}
    if not pairs:
        tables, charts = tables[1:], []
    return Report("prefix", tables, charts, data, notes)


def _pair(name: str, cold: Sequence[Reply], warm: Sequence[Reply]) -> Pair:
    return Pair(
        name=name,
        prompt_tokens=warm[0].prompt_tokens or 0,
        cached_tokens=int(median([reply.cached_tokens or 0 for reply in warm])),
        cold_ttft=median([reply.ttft for reply in cold]),
        warm_ttft=median([reply.ttft for reply in warm]),
    )
