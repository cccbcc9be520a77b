"""Requests of all lengths that start and end under load.

For a server that it starts itself, the step log shows how much of the wall time the same work takes
at the rates of one batch.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from one_batch import cold, time_batch
from pippin import LLM
from pippin.bench.client import (
    Load,
    LoadClient,
    LoadOutcome,
    LoadRequest,
    Target,
    send_load,
    summarize_load,
)
from pippin.bench.report import BenchError, Report, Table, busy_note, number, say
from pippin.bench.serve import ApiKey, Count, find_target, warm_up
from pippin.config import Config, ModelConfig
from pippin.metrics import StepRecord, read_step_log
from pippin.startup.checkpoint import find_checkpoint
from prompts import Prompts, count_with
from servers import as_options, pippin_server
from shared import Positive, run, verdict, without_collections

PROMPT_TOKENS = (5, 2500)  # of a request's own; every order of magnitude is as likely
SHARED_SHARE = 0.6  # of requests start with a prefix that others have too,
SHARED_TOKENS = (10, 1000)  # of this length
NUM_PREFIXES = 4
REPLY_TOKENS = (4, 300)
TEMPERATURES = (0.0, 0.0, 0.8, 1.0)
TOP_P = 0.95
DISCONNECT_SHARE = 0.1  # of clients


def churn_requests(prompts: Prompts) -> Iterator[LoadRequest]:
    shared = prompts.beside("beginnings")
    prefixes = [shared.text(SHARED_TOKENS[1]).split(" ") for _ in range(NUM_PREFIXES)]
    rng = random.Random(f"{prompts.seed}, lengths")
    while True:
        own_tokens = round(math.exp(rng.uniform(*map(math.log, PROMPT_TOKENS))))
        shared_tokens = rng.randint(*SHARED_TOKENS) if rng.random() < SHARED_SHARE else 0
        prefix = " ".join(rng.choice(prefixes)[: shared_tokens + 1])  # [0] is empty
        temperature = rng.choice(TEMPERATURES)
        sampled = {"top_p": TOP_P, "seed": rng.randrange(1 << 30)} if temperature else {}
        yield LoadRequest(
            prompt=prefix + prompts.text(own_tokens),
            prompt_tokens=shared_tokens + own_tokens,
            max_tokens=rng.randint(*REPLY_TOKENS),
            sampling={"temperature": temperature, **sampled},
            disconnects=rng.random() < DISCONNECT_SHARE,
        )


CONTEXT = 512  # tokens of each row: about what requests under churn hold
DECODE_TOKENS = 64
REPEATS = 2
EFFICIENCY_TARGET = 0.8


@dataclass(frozen=True)
class Rates:
    """Of one batch. Between measured widths a step's time is interpolated."""

    decode_steps: tuple[tuple[int, float], ...]  # rows -> seconds of a step of a settled batch
    prefill_tokens_per_second: float  # of the best batch

    def seconds(self, record: StepRecord) -> float:
        """What the work of a step takes in one batch."""
        rows, seconds = zip(*self.decode_steps, strict=True)
        decode = float(np.interp(record.decode_rows, rows, seconds)) if record.decode_rows else 0.0
        return decode + record.prefill_tokens / self.prefill_tokens_per_second

    def __str__(self) -> str:
        steps = ", ".join(f"{seconds * 1e3:.3g} ms at {n}" for n, seconds in self.decode_steps)
        return (
            f"One batch, in the same run: prefill {self.prefill_tokens_per_second:,.0f} tok/s; "
            f"decode steps of {steps} rows."
        )


def widths_to_measure(decode_rows: Iterable[int]) -> list[int]:
    """A few widths that cover all those that steps had: 1, 2, 4, ... and the widest."""
    widest = max(decode_rows, default=1) or 1
    return [n for n in (2**k for k in range(widest.bit_length())) if n < widest] + [widest]


def measure_rates(config: Config, widths: Sequence[int]) -> Rates:
    timings = []
    with LLM(config=cold(config, max(widths))) as llm:
        for width in widths:
            say(f"one batch of {width}")
            timings.append(time_batch(llm, width, CONTEXT, DECODE_TOKENS, REPEATS, choose=min))
    return Rates(
        decode_steps=tuple((timing.batch, timing.decode_seconds) for timing in timings),
        prefill_tokens_per_second=max(timing.prefill_tokens_per_second for timing in timings),
    )


def efficiency(records: Sequence[StepRecord], rates: Rates, outcome: LoadOutcome) -> float:
    """The time that the same work takes at one-batch rates, over the wall time."""
    return sum(map(rates.seconds, records)) / (outcome.ended - outcome.began)


def churn(
    config: Config,
    *,
    url: str | None = None,
    api_key: ApiKey = None,
    clients: Count | None = None,
    rate: Positive | None = None,
    seconds: Positive = 60.0,
    seed: int = 0,
    step_log: Path | None = None,
) -> Report:
    """Load a server with requests of mixed lengths; compare with the throughput of one batch.

    Prompts have 5 to 2,500 tokens, distributed evenly on a logarithmic scale; 60% of them start
    with a shared prefix of up to 1,000 more. Replies have 4 to 300 tokens; a tenth of the clients
    disconnect early.

    Parameters
    ----------
    url
        Address of an OpenAI endpoint; MODEL is then the model name in the requests, by default the
        first that it lists. Without --url a server is started, and its step log is evaluated.
    api_key
        API key for --url, sent as a bearer token.
    clients
        Number of clients that send one request after another. Default: 12 without --rate.
    rate
        Requests per second that arrive as a Poisson process.
    seconds
        Seconds during which new requests are sent; requests in flight then finish.
    seed
        Seed of the requests: the same seed sends the same requests.
    step_log
        File for the step log of the started server, one line of JSON per step.
    """
    if clients is not None and rate is not None:
        raise BenchError("--clients and --rate exclude each other: give one of them")
    load = Load(clients or 12, rate, seconds)
    if url is None:
        return _churn_here(config, load, seed, step_log)
    name = config.model.model
    if step_log is not None or config != Config(ModelConfig(model=name)):
        raise BenchError(
            "--url names a running server: remove --step-log and options of the engine, which have "
            "no effect on it"
        )
    model = None if name == ModelConfig.model else name
    return churn_at(url, load, seed=seed, model=model, api_key=api_key)


def churn_at(
    url: str, load: Load, *, seed: int, model: str | None = None, api_key: str | None = None
) -> Report:
    """The load against a running server; words count as tokens."""
    notes = busy_note()
    target = find_target(url, model, api_key)
    outcome = _run(target, load, Prompts(f"churn {seed}"))
    return summarize(target.model, load, outcome, notes)


def _churn_here(config: Config, load: Load, seed: int, step_log: Path | None) -> Report:
    """The load against a server that is started here, then the rates of one batch on its model."""
    notes = busy_note()
    model_dir = find_checkpoint(config.model)
    with TemporaryDirectory(prefix="pippin-bench-") as folder:
        log = step_log or Path(folder) / "steps"
        model, *options = as_options(config)
        say("starting a server")
        with pippin_server(model, [*options, "--step-log", str(log)]) as target:
            outcome = _run(target, load, Prompts(f"churn {seed}", count_with(model_dir)))
        records = read_step_log(log)
        served = [r for r in records if outcome.began <= r.planned and r.resumed <= outcome.ended]
        rates = measure_rates(config, widths_to_measure(r.decode_rows for r in served))
    share = efficiency(served, rates, outcome)
    report = summarize(model_dir.name, load, outcome, [*notes, str(rates)])
    wanted = verdict(share, "{:.0%}", at_least=EFFICIENCY_TARGET)
    report.tables[0].rows.append(("efficiency", f"{share:.1%}, {wanted}"))
    report.data.update({"efficiency": share, "rates": asdict(rates), "num_steps": len(served)})
    return report


def _run(target: Target, load: Load, prompts: Prompts) -> LoadOutcome:
    client = LoadClient(target)
    asyncio.run(warm_up(client, prompts.beside("warm-up").text))
    say(f"{load}, for {load.seconds:g} s")
    with without_collections():
        sent = asyncio.run(send_load(client, load, churn_requests(prompts)))
    return summarize_load(sent)


def summarize(model: str, load: Load, outcome: LoadOutcome, notes: list[str]) -> Report:
    rows: list[tuple[str, ...]] = [
        ("requests", str(outcome.num_requests)),
        ("errors", str(outcome.num_errors)),
        ("generated, tok/s", number(outcome.generated_per_second)),
        ("prompts, tok/s", number(outcome.prompt_tokens / outcome.seconds)),
        *((f"{name}, ms", number(value)) for name, value in outcome.times_ms.items()),
    ]
    title = f"{model}, {outcome.seconds:.0f} s"
    table = Table(title, ("requests of all lengths", str(load)), rows)
    data: dict[str, Any] = {"model": model, "load": asdict(load), "outcome": asdict(outcome)}
    notes = [*notes, *(f"{count} x {message}" for message, count in outcome.errors.items())]
    return Report("churn", [table], data, notes)


if __name__ == "__main__":
    run(churn, "model", "engine")
