"""`pippin bench compare`: Pippin and mlx-lm's server, on the same weights, in turn. Any model.

Both servers run from start to end, but only one has work at a time; their order alternates from
round to round. Both get the same new prompts.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pippin.bench.client.wire import LoadClient, without_collections
from pippin.bench.computes_on_cpu import computes_on_cpu
from pippin.bench.prompts import Prompts, count_with
from pippin.bench.results.report import Report, Table, busy_note, number, say
from pippin.bench.results.samples import median
from pippin.bench.served.scenarios import Numbers, warm_up
from pippin.bench.served.suite import Scenario, choose
from pippin.bench.servers.endless_copy import read_header, write_endless_copy
from pippin.bench.servers.processes import mlx_lm_server, pippin_server

OURS, THEIRS = "pippin", "mlx-lm"
Rounds = dict[str, dict[str, list[Numbers]]]  # scenario -> server -> one for each round


def compare(
    model_dir: Path,
    *,
    bundled: bool,
    backend: str = "mlx",
    float32: bool | None = None,
    only: Sequence[str] = (),
    rounds: int = 3,
    pippin_options: Sequence[str] = (),
    their_options: Sequence[str] = (),
) -> Report:
    """`bundled`: the targets are those for the bundled model. `float32`: by default on CPUs."""
    scenarios = choose(only, bundled=bundled)
    notes = busy_note()
    if float32 is None:
        float32 = any(computes_on_cpu(library) for library in {backend, "mlx"})
    with ExitStack() as stack:
        say("copying the checkpoint")
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pippin-bench-")))
        write_endless_copy(model_dir, copy, float32=float32)
        model = describe_model(model_dir.name, copy)
        count = count_with(copy)
        say("starting both servers")
        our_options = ["--backend", backend, *pippin_options]
        clients = {
            THEIRS: LoadClient(stack.enter_context(mlx_lm_server(copy, their_options))),
            OURS: LoadClient(stack.enter_context(pippin_server(str(copy), our_options))),
        }
        for name, client in clients.items():
            say(f"warming up {name}")
            asyncio.run(warm_up(client, Prompts(f"warm-up {name}", count)))
        results: Rounds = {s.name: {name: [] for name in clients} for s in scenarios}
        for scenario in scenarios:
            for turn in range(rounds):
                for name in sorted(clients, reverse=bool(turn % 2)):
                    say(f"{scenario.title}: {name}, round {turn + 1} of {rounds}")
                    prompts = Prompts(f"{scenario.name} {turn}", count)
                    results[scenario.name][name].append(measure(scenario, clients[name], prompts))
    return summarize(model, scenarios, results, notes)


def describe_model(name: str, model_dir: Path) -> str:
    """A checkpoint in words: "name (llama, 540 MB of F32)", whatever most of its weights are."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    nbytes: Counter[str] = Counter()
    for path in model_dir.glob("*.safetensors"):
        header, _ = read_header(path)
        header.pop("__metadata__", None)
        for entry in header.values():
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
