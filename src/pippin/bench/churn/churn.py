"""`pippin bench churn`: requests of all lengths over HTTP, at any OpenAI endpoint.

For a server that it starts itself, the step log shows how much of the wall time the same work takes
at the rates of one batch, and where the rest went.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pippin.bench.churn.breakdown import Breakdown, break_down
from pippin.bench.churn.rates import Rates, measure_rates, widths_to_measure
from pippin.bench.churn.requests import churn_requests
from pippin.bench.client.load import Load, LoadOutcome, send_load, summarize_load
from pippin.bench.client.wire import LoadClient, Target, without_collections
from pippin.bench.prompts import Prompts, count_with
from pippin.bench.results.report import Report, Table, busy_note, number, say, verdict
from pippin.bench.served.scenarios import warm_up
from pippin.bench.served.serving import find_target
from pippin.bench.servers.endless_copy import write_endless_copy
from pippin.bench.servers.processes import as_options, pippin_server
from pippin.config import Config
from pippin.metrics import read_step_log

EFFICIENCY_TARGET = 0.8


@dataclass(frozen=True)
class StepAccount:
    """What the step log of a started server adds."""

    rates: Rates
    breakdown: Breakdown
    num_steps: int


def churn_at(
    url: str, load: Load, *, seed: int, model: str | None = None, api_key: str | None = None
) -> Report:
    """The load against a running server; words count as tokens."""
    notes = busy_note()
    target = find_target(url, model, api_key)
    outcome = _run(target, load, Prompts(f"churn {seed}"))
    return summarize(target.model, load, outcome, None, notes)


def churn(
    config: Config, model_dir: Path, load: Load, *, seed: int, step_log: Path | None = None
) -> Report:
    """The load against a server that is started here, then the rates of one batch on its model.

    `step_log`: where to keep the server's.
    """
    notes = busy_note()
    with TemporaryDirectory(prefix="pippin-bench-") as folder:
        copy, log = Path(folder) / model_dir.name, step_log or Path(folder) / "steps"
        copy.mkdir()
        write_endless_copy(model_dir, copy, float32=False)
        config = replace(config, model=replace(config.model, model=str(copy)))
        model, *options = as_options(config)
        say("starting a server")
        with pippin_server(model, [*options, "--step-log", str(log)]) as target:
            outcome = _run(target, load, Prompts(f"churn {seed}", count_with(copy)))
        records = read_step_log(log)
        served = [r for r in records if outcome.began <= r.planned and r.resumed <= outcome.ended]
        rates = measure_rates(config, widths_to_measure(r.decode_rows for r in served))
    breakdown = break_down(served, rates, outcome.began, outcome.ended)
    account = StepAccount(rates, breakdown, len(served))
    return summarize(model_dir.name, load, outcome, account, notes)


def _run(target: Target, load: Load, prompts: Prompts) -> LoadOutcome:
    client = LoadClient(target)
    asyncio.run(warm_up(client, prompts.beside("warm-up")))
    say(f"{load}, for {load.seconds:g} s")
    with without_collections():
        sent = asyncio.run(send_load(client, load, churn_requests(prompts)))
    return summarize_load(sent)


def summarize(
    model: str, load: Load, outcome: LoadOutcome, account: StepAccount | None, notes: list[str]
) -> Report:
    tables = [_load_table(model, load, outcome)]
    data: dict[str, Any] = {"model": model, "load": asdict(load), "outcome": asdict(outcome)}
    if account is not None:
        tables.append(_breakdown_table(account))
        data |= {"efficiency": account.breakdown.efficiency, **asdict(account)}
        notes = [*notes, str(account.rates)]
    notes = [*notes, *(f"{count} x {message}" for message, count in outcome.errors.items())]
    return Report("churn", tables, data, notes)


def _load_table(model: str, load: Load, outcome: LoadOutcome) -> Table:
    rows: list[tuple[str, ...]] = [
        ("requests", str(outcome.num_requests)),
        ("errors", str(outcome.num_errors)),
        ("generated, tok/s", number(outcome.generated_per_second)),
        ("prompts, tok/s", number(outcome.prompt_per_second)),
        *((f"{name}, ms", number(value)) for name, value in outcome.times_ms.items()),
    ]
    title = f"{model}, {outcome.seconds:.0f} s"
    return Table(title, ("requests of all lengths", str(load)), rows)


def _breakdown_table(account: StepAccount) -> Table:
    parts = account.breakdown
    target = verdict(parts.efficiency, "{:.0%}", at_least=EFFICIENCY_TARGET)
    targets = {"work": f"efficiency {target}"}
    rows: list[tuple[str, ...]] = [
        (name, f"{seconds:.1f}", f"{seconds / parts.wall:.1%}", targets.get(name, ""))
        for name, seconds in (*parts.named(), ("wall", parts.wall))
    ]
    title = f"Where the time of {account.num_steps:,} steps went"
    return Table(title, ("", "seconds", "share", "target"), rows)
