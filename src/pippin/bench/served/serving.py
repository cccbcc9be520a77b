"""`pippin bench serve`: latency and throughput of any OpenAI endpoint under load. Knows only HTTP.

If the server is Pippin, its own account of the overlap is printed beside what clients saw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import httpx

from pippin.bench.client.loads import Load, LoadOutcome, run_load, summarize_load
from pippin.bench.client.wire import LoadClient, Target
from pippin.bench.prompts import Prompts
from pippin.bench.results.plot import Bar, Bars, Chart, Lines
from pippin.bench.results.report import Report, Table, busy_note, number, say
from pippin.bench.served.scenarios import Interference, Numbers, interfere, warm_up
from pippin.bench.served.suite import INTERFERENCE
from pippin.bench.served.watching import (
    WatchingCost,
    cost_of_watching,
    watching_chart,
    watching_table,
)
from pippin.bench.servers.processes import first_model

SHARES = ("device_idle_share", "host_hidden_share")


def find_target(url: str, model: str | None, api_key: str | None) -> tuple[Target, bool]:
    """The server at `url`, and whether it is Pippin."""
    url = url.rstrip("/").removesuffix("/v1")
    is_pippin = bool(read_shares(url, api_key))
    name = model or first_model(url, api_key)
    extra = {"ignore_eos": True} if is_pippin else {}
    return Target(url, name, api_key, extra), is_pippin


def read_shares(url: str, api_key: str | None) -> dict[str, float]:
    """Device idle share and host time hidden over the last steps; empty if it is not Pippin."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/status", headers=headers, timeout=10)
        metrics = answer.json()["metrics"]
        return {name: float(metrics[name]) for name in SHARES}
    except (httpx.TransportError, ValueError, LookupError, TypeError):
        return {}


def measure_server(
    url: str,
    loads: Sequence[Load],
    *,
    model: str | None = None,
    api_key: str | None = None,
    num_streams: int = 0,
    long_prompt_tokens: int = 2000,
    num_watchers: int = 0,
    num_pairs: int = 8,
) -> Report:
    """Every load in turn; with `num_streams`, also streams while long prompts arrive; with
    `num_watchers`, also what they cost each load."""
    notes = busy_note()
    target, is_pippin = find_target(url, model, api_key)
    client = LoadClient(target)
    asyncio.run(warm_up(client, Prompts("warm-up")))
    outcomes = []
    for load in loads:
        say(f"{load.num_requests} requests, {load}")
        prompts = Prompts(f"serve {load}")
        replies = asyncio.run(run_load(client, load, prompts))
        shares = read_shares(target.url, api_key) if is_pippin else {}
        outcomes.append(summarize_load(load, replies, shares))
    met = None
    if num_streams:
        say(f"{num_streams} streams while prompts of {long_prompt_tokens:,} tokens arrive")
        met = asyncio.run(
            interfere(
                client,
                Prompts("serve interference"),
                num_streams=num_streams,
                prompt_tokens=long_prompt_tokens,
            )
        )
    costs = []
    if num_watchers:
        costs = cost_of_watching(client, loads, num_watchers=num_watchers, num_pairs=num_pairs)
    notes += [
        f"{o.load}: {len(o.errors)} of {o.load.num_requests} requests failed, "
        f"the first with: {o.errors[0]}"
        for o in outcomes
        if o.errors
    ]
    return summarize(target, outcomes, met, costs, notes)


def summarize(
    target: Target,
    outcomes: list[LoadOutcome],
    met: Interference | None,
    costs: list[WatchingCost],
    notes: list[str],
) -> Report:
    tables = [_load_table(outcomes)] if outcomes else []
    charts = _charts(outcomes)
    data: dict[str, Any] = {"url": target.url, "model": target.model}
    data["loads"] = [
        {**asdict(outcome), "tokens_per_second": outcome.tokens_per_second} for outcome in outcomes
    ]
    if met is not None:
        numbers = met.numbers()
        rows: list[tuple[str, ...]] = [
            (f"{m.name}, {m.unit}", number(numbers[m.name])) for m in INTERFERENCE
        ]
        tables.append(Table("Streams while long prompts arrive", ("measure", "value"), rows))
        charts.append(_interference_chart(numbers))
        data["interference"] = numbers
    if costs:
        tables.append(watching_table(costs))
        charts += [watching_chart(cost) for cost in costs]
        data["watching"] = [cost.as_dict() for cost in costs]
    return Report("serve", tables, charts, data, notes)


def _load_table(outcomes: list[LoadOutcome]) -> Table:
    with_shares = any(outcome.shares for outcome in outcomes)
    header = ("load", "requests", "tok/s", "TTFT p50, ms", "p99", "gap p50, ms", "p99")
    rows: list[tuple[str, ...]] = []
    for o in outcomes:
        times = (o.ttft.p50, o.ttft.p99, o.gap.p50, o.gap.p99)
        served = f"{o.load.num_requests - len(o.errors)} of " if o.errors else ""
        requests = f"{served}{o.load.num_requests}"
        cells = (str(o.load), requests, number(o.tokens_per_second))
        shares = tuple(f"{o.shares[name]:.1%}" for name in SHARES) if o.shares else ()
        rows.append((*cells, *(number(seconds * 1e3) for seconds in times), *shares))
    sizes = outcomes[0].load
    title = f"{sizes.prompt_tokens:,} tokens in, {sizes.output_tokens:,} out"
    return Table(title, (*header, "device idle", "host hidden") if with_shares else header, rows)


def _charts(outcomes: list[LoadOutcome]) -> list[Chart]:
    charts: list[Chart] = []
    for kind, label in (("concurrency", "requests at a time"), ("rate", "requests a second")):
        chosen = [o for o in outcomes if o.load.kind == kind]
        if not chosen:
            continue
        throughput = {"throughput": [(o.load.level, o.tokens_per_second) for o in chosen]}
        waits = {
            "TTFT p50": [(o.load.level, o.ttft.p50 * 1e3) for o in chosen],
            "TTFT p99": [(o.load.level, o.ttft.p99 * 1e3) for o in chosen],
            "gap p99": [(o.load.level, o.gap.p99 * 1e3) for o in chosen],
        }
        charts.append(Lines("Throughput", label, "tok/s", throughput, log_x=True))
        charts.append(Lines("Waiting", label, "ms", waits, log_x=True, log_y=True))
    return charts


def _interference_chart(numbers: Numbers) -> Bars:
    gaps = ("idle gap p50", "busy gap p99", "longest stop")
    rows = [Bar(name, (numbers[name],)) for name in gaps]
    title = "Gaps between tokens of running streams while long prompts arrive"
    return Bars(title, "ms", ("gap",), rows, unit=" ms", log_x=True)
