"""Pippin and mlx-lm's server on the same weights, in turn: scenarios, ratios, targets.

Both servers run from start to end, but only one has work at a time; their order alternates from
round to round. Both get the same new prompts. Some targets hold for the bundled hybrid model alone,
whose prefill mlx-lm does token by token off Metal; others for any checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from pippin.bench.client import LoadClient
from pippin.bench.report import BenchError, Report, Table, busy_note, median, number, ratio, say
from pippin.bench.serve import Count, warm_up
from pippin.config import ModelConfig
from pippin.startup.checkpoint import find_checkpoint
from pippin.startup.resolve import choose_backend
from prompts import Prompts, count_with
from scenarios import (
    BRANCHES,
    CONVERSATIONS,
    LONG_TOKENS,
    PROMPT_TOKENS,
    REPEATED_TOKENS,
    REPLY_TOKENS,
    RUNNING_STREAMS,
    SYSTEM_TOKENS,
    TINY_TOKENS,
    TURNS,
    Numbers,
    branches,
    cold_prompt,
    conversations,
    interference,
    repeated_prompt,
    short_beside_long,
    streams,
)
from servers import computes_on_cpu, mlx_lm_server, pippin_server, read_header, write_endless_copy
from shared import Names, run, verdict, without_collections

LONGER_REPLY_TOKENS = 50
DECODE_TARGETS = {True: (1.6, 1.8, 1.8, 1.8), False: (1.3, 1.5, 1.5, 1.5)}  # by: bundled

Run = Callable[[LoadClient, Prompts], Coroutine[Any, Any, Numbers]]


@dataclass(frozen=True)
class Measure:
    """One number of a scenario."""

    name: str
    unit: str
    times_better: float | None = None  # the least that is wanted
    at_most: float | None = None  # the most that is wanted, of our own number
    higher_is_better: bool = False

    def verdict(self, ours: float, theirs: float) -> str:
        """The target and whether it is met; empty without one."""
        if self.times_better is not None:
            return verdict(self.advantage(ours, theirs), "{:g}x", at_least=self.times_better)
        if self.at_most is not None:
            return f"ours {verdict(ours, '{:g}', at_most=self.at_most)}"
        return ""

    def advantage(self, ours: float, theirs: float) -> float:
        """How many times better ours is."""
        return ratio(ours, theirs) if self.higher_is_better else ratio(theirs, ours)


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    measures: tuple[Measure, ...]
    run: Run


def choose(names: Sequence[str], *, bundled: bool = True) -> list[Scenario]:
    """The scenarios of these names; a name without a number takes all that start so."""
    scenarios = all_scenarios(bundled=bundled)
    known = {s.name for s in scenarios} | {_family(s) for s in scenarios}
    if unknown := [name for name in names if name not in known]:
        raise BenchError(
            f"no scenario {unknown[0]!r}; there are {', '.join(s.name for s in scenarios)}"
        )
    return [s for s in scenarios if not names or s.name in names or _family(s) in names]


def _family(scenario: Scenario) -> str:
    return scenario.name.split("-")[0]


def all_scenarios(*, bundled: bool = True) -> tuple[Scenario, ...]:
    """With the targets for the bundled model, or for any other."""

    def if_bundled(times_better: float) -> float | None:
        return times_better if bundled else None

    def scenario(name: str, title: str, run: Run, *measures: Measure) -> Scenario:
        return Scenario(name, title, measures, run)

    def decode(num_streams: int, times_better: float) -> Scenario:
        return scenario(
            f"decode-{num_streams}",
            f"{num_streams} stream{'s that start together' if num_streams > 1 else ''}",
            partial(streams, num_streams=num_streams),
            Measure("decode", "tok/s", times_better, higher_is_better=True),
            Measure("gap p99", "ms", 1.0),
        )

    def chats(at_once: int, tokens: int, total: float | None, ttft: float | None) -> Scenario:
        return scenario(
            f"chats-{at_once}",
            f"{CONVERSATIONS} conversations x {TURNS} turns, {at_once} at a time, replies of "
            f"{tokens} tokens, a shared {SYSTEM_TOKENS}-token start",
            partial(conversations, at_once=at_once, reply_tokens=tokens),
            Measure("total", "s", total),
            Measure("TTFT p50", "s", ttft),
        )

    return (
        scenario(
            "prefill",
            f"cold prompt of {PROMPT_TOKENS:,} tokens",
            cold_prompt,
            Measure("prefill", "tok/s", if_bundled(2.5), higher_is_better=True),
            Measure("TTFT", "s"),
        ),
        *map(decode, (1, 4, 8, 16), DECODE_TARGETS[bundled]),
        scenario(
            "repeat",
            f"the same prompt of {REPEATED_TOKENS:,} tokens again",
            repeated_prompt,
            Measure("TTFT again", "ms", 1.0),
            Measure("of its cold TTFT", "%", at_most=3.0),
        ),
        scenario(
            "beside",
            f"a {TINY_TOKENS}-token prompt beside one of {LONG_TOKENS:,}",
            short_beside_long,
            Measure("short TTFT", "ms"),
            Measure("of the long one's", "%", at_most=20.0),
            Measure("long / alone", "x", at_most=1.1),
        ),
        scenario(
            "interference",
            f"{RUNNING_STREAMS} streams while {PROMPT_TOKENS:,}-token prompts arrive",
            interference,
            Measure("busy gap p99", "ms"),
            Measure("idle gap p50", "ms"),
            Measure("busy / idle", "x", at_most=4.0),
            Measure("longest stop", "ms"),
            Measure("prompt TTFT", "s", 2.0),
        ),
        scenario(
            "branches",
            f"{BRANCHES} branches of one {PROMPT_TOKENS:,}-token prompt at once",
            branches,
            Measure("TTFT p50", "s", if_bundled(8.0)),
            Measure("total", "s"),
        ),
        chats(CONVERSATIONS, REPLY_TOKENS, if_bundled(2.5), if_bundled(5.0)),
        chats(4, LONGER_REPLY_TOKENS, 2.0, None),
    )


OptionString = Annotated[str, Parameter(allow_leading_hyphen=True)]
OURS, THEIRS = "pippin", "mlx-lm"
Rounds = dict[str, dict[str, list[Numbers]]]  # scenario -> server -> one for each round


def compare(
    model: str = ModelConfig.model,
    *,
    backend: Literal["auto", "mlx", "torch"] = "auto",
    only: Names = None,
    rounds: Count = 3,
    float32: bool | None = None,
    pippin_options: OptionString = "",
    their_options: OptionString = "",
) -> Report:
    """Compare Pippin with mlx-lm's server on the same weights; print ratios.

    mlx-lm's server gets the same BLAS library as Pippin.

    Parameters
    ----------
    model
        Model: the name of the demo model, a local directory, or a Hugging Face id.
    backend
        Backend of Pippin.
    only
        Scenarios to run: prefill, decode-1, decode-4, decode-8, decode-16, repeat, beside,
        interference, branches, chats-8, chats-4; `decode` for all four of that name.
        Default: all.
    rounds
        Number of runs per scenario and server; the table shows medians.
    float32
        Run both servers in float32. Default: on CPUs; otherwise the data type of the checkpoint.
    pippin_options
        Further options of `pippin serve`, as one string.
    their_options
        Further options of mlx-lm's server, as one string: "--prompt-cache-size 64".
    """
    model_dir = find_checkpoint(ModelConfig(model=model))
    chosen = choose_backend(backend, model_dir)
    scenarios = choose(only or (), bundled=model == ModelConfig.model)
    notes = busy_note()
    if float32 is None:
        float32 = any(computes_on_cpu(library) for library in {chosen, "mlx"})
    with ExitStack() as stack:
        say("copying the checkpoint")
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pippin-bench-")))
        write_endless_copy(model_dir, copy, float32=float32)
        described = describe_model(model_dir.name, copy)
        count = count_with(copy)
        say("starting both servers")
        our_options = ["--backend", chosen, *shlex.split(pippin_options)]
        clients = {
            THEIRS: LoadClient(
                stack.enter_context(mlx_lm_server(copy, shlex.split(their_options)))
            ),
            OURS: LoadClient(stack.enter_context(pippin_server(str(copy), our_options))),
        }
        for name, client in clients.items():
            say(f"warming up {name}")
            asyncio.run(warm_up(client, Prompts(f"warm-up {name}", count).text))
        results: Rounds = {s.name: {name: [] for name in clients} for s in scenarios}
        for scenario in scenarios:
            for turn in range(rounds):
                for name in sorted(clients, reverse=bool(turn % 2)):
                    say(f"{scenario.title}: {name}, round {turn + 1} of {rounds}")
                    prompts = Prompts(f"{scenario.name} {turn}", count)
                    results[scenario.name][name].append(measure(scenario, clients[name], prompts))
    return summarize(described, scenarios, results, notes)


def describe_model(name: str, model_dir: Path) -> str:
    """A checkpoint in words: "name (llama, 540 MB of F32)", whatever most of its weights are."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    nbytes: Counter[str] = Counter()
    for path in model_dir.glob("*.safetensors"):
        for entry in read_header(path).values():
            begin, end = entry["data_offsets"]
            nbytes[entry["dtype"]] += end - begin
    ((dtype, _),) = nbytes.most_common(1)
    return f"{name} ({config['model_type']}, {nbytes.total() / 1e6:,.0f} MB of {dtype})"


def measure(scenario: Scenario, client: LoadClient, prompts: Prompts) -> Numbers:
    with without_collections():
        return asyncio.run(scenario.run(client, prompts))


def summarize(
    model: str, scenarios: Sequence[Scenario], results: Rounds, notes: list[str]
) -> Report:
    rows: list[tuple[str, ...]] = []
    data: dict[str, Any] = {}
    for scenario in scenarios:
        medians = {
            name: {m.name: median([r[m.name] for r in runs]) for m in scenario.measures}
            for name, runs in results[scenario.name].items()
        }
        advantages = {}
        title = scenario.title
        for m in scenario.measures:
            ours, theirs = medians[OURS][m.name], medians[THEIRS][m.name]
            times = advantages[m.name] = m.advantage(ours, theirs)
            cells = (number(ours), number(theirs), f"{number(times)}x", m.verdict(ours, theirs))
            rows.append((title, f"{m.name}, {m.unit}", *cells))
            title = ""
        data[scenario.name] = {
            "rounds": results[scenario.name],
            "medians": medians,
            "advantage": advantages,
        }
    header = ("scenario", "measure", OURS, THEIRS, "times better", "target")
    table = Table(f"{model}: Pippin and {THEIRS}, medians over rounds", header, rows)
    return Report("compare", [table], {"model": model, "scenarios": data}, notes)


if __name__ == "__main__":
    run(compare)
