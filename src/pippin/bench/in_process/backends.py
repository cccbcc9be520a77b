"""`pippin bench backends`: one model on several backends, in turn, by one runner.

Every turn is `pippin bench one-batch` in a process of its own: a backend's libraries, threads and
memory are not in another one's way. The environment, and so the number of threads, is the same.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pippin.bench.errors import BenchError
from pippin.bench.results.plot import Bar, Bars
from pippin.bench.results.report import Report, Table, busy_note, number, say
from pippin.bench.results.samples import median
from pippin.bench.served.suite import Measure
from pippin.bench.servers.processes import as_options
from pippin.config import BackendName, Config

BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
Numbers = dict[str, float]
LOG_TAIL_CHARS = 2000


@dataclass(frozen=True)
class Lengths:
    """What is measured: rows of a batch, and the tokens of each."""

    batches: tuple[int, ...]
    input: int
    output: int


def backends(config: Config, *, names: Sequence[str], lengths: Lengths, rounds: int) -> Report:
    """The first of `names` is what the others are compared with."""
    chosen = choose(names)
    notes = busy_note()
    results: dict[str, list[Numbers]] = {name: [] for name in chosen}
    for turn in range(rounds):
        for name in chosen if turn % 2 == 0 else reversed(chosen):
            say(f"{name}, round {turn + 1} of {rounds}")
            results[name].append(read_timings(run_one_batch(config, name, lengths)))
    return summarize(config.model.model, lengths, results, notes)


def choose(names: Sequence[str]) -> list[BackendName]:
    if unknown := [name for name in names if name not in BACKENDS]:
        raise BenchError(f"no backend {unknown[0]!r}; there are {', '.join(BACKENDS)}")
    if len(set(names)) < max(2, len(names)):
        raise BenchError(f"different backends are compared, two at least: got {', '.join(names)}")
    return [backend for name in names for backend in BACKENDS if backend == name]


def run_one_batch(config: Config, backend: BackendName, lengths: Lengths) -> list[dict[str, Any]]:
    """The timings that `pippin bench one-batch` writes, one for each size."""
    model = dataclasses.replace(config.model, backend=backend)
    options = as_options(dataclasses.replace(config, model=model), without=("prefix_cache",))
    options += ["--batch", ",".join(map(str, lengths.batches)), "--repeats", "1", "--no-ceilings"]
    options += ["--input", str(lengths.input), "--output", str(lengths.output)]
    with tempfile.TemporaryDirectory(prefix="pippin-bench-") as folder:
        written = Path(folder, "timings.json")
        command = [sys.executable, "-m", "pippin", "bench", "one-batch", *options]
        done = subprocess.run([*command, "--json", written], capture_output=True, text=True)
        if done.returncode != 0:
            said = done.stderr[-LOG_TAIL_CHARS:].strip()
            raise BenchError(f"{backend} left with status {done.returncode}:\n{said}")
        timings: list[dict[str, Any]] = json.loads(written.read_text(encoding="utf-8"))["timings"]
    return timings


def read_timings(timings: Sequence[dict[str, Any]]) -> Numbers:
    found: Numbers = {}
    for timing in timings:
        batch = timing["batch"]
        found[f"TTFT {batch}"] = timing["prefill_seconds"] * 1e3
        found[f"prefill {batch}"] = timing["prefill_tokens_per_second"]
        found[f"decode {batch}"] = timing["decode_tokens_per_second"]
    return found


def measures_of(lengths: Lengths) -> list[tuple[str, Measure]]:
    """By name in `read_timings`. A single prompt's first token, then rates by width."""
    found = []
    if 1 in lengths.batches:
        found.append(("TTFT 1", Measure(f"TTFT of {lengths.input:,} tokens", "ms")))
    for what in ("prefill", "decode"):
        for batch in lengths.batches:
            title = f"{what}, {batch} row{'s' if batch > 1 else ''}"
            found.append((f"{what} {batch}", Measure(title, "tok/s", higher_is_better=True)))
    return found


def summarize(
    model: str, lengths: Lengths, results: dict[str, list[Numbers]], notes: list[str]
) -> Report:
    first, *others = results
    rows: list[tuple[str, ...]] = []
    bars: list[Bar] = []
    for name, measure in measures_of(lengths):
        medians = {
            backend: median([turn[name] for turn in turns]) for backend, turns in results.items()
        }
        times = [measure.advantage(medians[other], medians[first]) for other in others]
        values = [number(value) for value in medians.values()]
        rows.append((f"{measure.name}, {measure.unit}", *values, *(f"{number(t)}x" for t in times)))
        bars.append(Bar(measure.name, tuple(times), f"{' and '.join(values)} {measure.unit}"))
    header = ("measure", *results, *(f"{other} times {first}" for other in others))
    title = f"{Path(model).name}: {lengths.input:,} tokens in, {lengths.output:,} out, medians"
    series = tuple(f"{other} times better than {first}" for other in others)
    return Report(
        name="backends",
        tables=[Table(title, header, rows)],
        charts=[Bars(title, "times better (below 1: worse)", series, bars, unit="x", log_x=True)],
        data={"settings": dataclasses.asdict(lengths), "rounds": results},
        notes=notes,
    )
