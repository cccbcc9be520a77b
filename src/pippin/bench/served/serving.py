"""`pippin bench serve`: latency and throughput of any OpenAI endpoint under load. Knows only HTTP.

For a Pippin server, its own metrics of the overlap stand beside what clients saw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import httpx

from pippin.bench.client.load import Load, LoadOutcome, RequestSizes, send_load, summarize_load
from pippin.bench.client.wire import LoadClient, Target
from pippin.bench.prompts import Prompts
from pippin.bench.results.report import Report, Table, busy_note, number, say
from pippin.bench.served.scenarios import warm_up
from pippin.bench.served.watching import cost_of_watching
from pippin.bench.servers.processes import first_model

SHARES = ("device_idle_share", "host_hidden_share")


@dataclass(frozen=True)
class ServedLoad:
    load: Load
    outcome: LoadOutcome
    shares: dict[str, float]  # of Pippin's own metrics; empty for other servers


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
    sizes: RequestSizes,
    *,
    model: str | None = None,
    api_key: str | None = None,
    num_watchers: int = 0,
    num_pairs: int = 8,
) -> Report:
    """Each load alone; with `num_watchers`, also what they cost it."""
    notes = busy_note()
    target, is_pippin = find_target(url, model, api_key)
    client = LoadClient(target)
    asyncio.run(warm_up(client, Prompts("warm-up")))
    served = []
    for load in loads:
        say(f"{sizes.number} requests, {load}")
        requests = sizes.requests(Prompts(f"serve {load}"))
        outcome = summarize_load(asyncio.run(send_load(client, load, requests)))
        shares = read_shares(target.url, api_key) if is_pippin else {}
        served.append(ServedLoad(load, outcome, shares))
        notes += [f"{load}: {n} x {message}" for message, n in outcome.errors.items()]
    report = summarize(target, served, sizes, notes)
    if num_watchers:
        table, report.data["watching"] = cost_of_watching(
            client, loads, sizes, num_watchers=num_watchers, num_pairs=num_pairs
        )
        report.tables.append(table)
    return report


def summarize(
    target: Target, served: Sequence[ServedLoad], sizes: RequestSizes, notes: list[str]
) -> Report:
    header = ("load", "requests", "tok/s", "TTFT p50, ms", "p99", "gap p50, ms", "p99")
    shared = ("device idle", "host hidden") if any(each.shares for each in served) else ()
    rows: list[tuple[str, ...]] = []
    for each in served:
        found = each.outcome
        answered = f"{found.num_requests - found.num_errors} of " if found.errors else ""
        requests = f"{answered}{found.num_requests}"
        times = (number(value) for value in found.times_ms.values())
        shares = (f"{each.shares[name]:.1%}" for name in SHARES if each.shares)
        rows.append((str(each.load), requests, number(found.generated_per_second), *times, *shares))
    title = f"{sizes.prompt_tokens:,} tokens in, {sizes.output_tokens:,} out"
    data = {
        "url": target.url,
        "model": target.model,
        "loads": [
            {**asdict(each), "tokens_per_second": each.outcome.generated_per_second}
            for each in served
        ],
    }
    return Report("serve", [Table(title, (*header, *shared), rows)], data, notes)
