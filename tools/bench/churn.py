"""Requests of all lengths that start and end under load, and where a server's time went.

For a server that it starts itself, the step log shows how much of the wall time the same work takes
at the rates of one batch. A step's span is from the end of the one before it to its own. Which of
two steps that follow each other a second belongs to is blurred: nothing waits for a chunk in the
middle of a prompt, and a launch that is held up by a busy device delays the end of the step before
it. So every cause has a price, and only sums are reported.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from one_batch import time_batch
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
from pippin.bench.report import BenchError, Report, Table, busy_note, median, number, say
from pippin.bench.serve import ApiKey, Count, find_target, warm_up
from pippin.config import Config, ModelConfig
from pippin.metrics import StepLog, StepRecord, read_step_log
from pippin.startup.checkpoint import find_checkpoint
from prompts import Prompts, count_with
from servers import as_options, pippin_server, write_endless_copy
from shared import Positive, run, verdict, with_rows, without_collections, without_usual_drafts
from steps import first_token_seconds, generate, last_step, prompts_for

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
CHUNKS = (24, 56, 120, 248, 504)  # tokens
NEW_LENGTHS = (19, 23, 27, 31, 35, 39, 43, 47, 51)  # tokens: few, so that times are precise
REPEATS = 2

Points = tuple[tuple[int, float], ...]  # of a curve, by ascending x


@dataclass(frozen=True)
class Rates:
    """Seconds. Between measured points they are interpolated."""

    decode_steps: Points  # rows -> a step of a settled batch
    chunks: Points  # tokens -> the device's time for a forward over one prompt
    prefill_tokens_per_second: float  # of the best batch
    new_prefill: float = 0.0  # what a forward over prompts takes longer the first time
    new_decode: float = 0.0  # what a step over rows does

    def decode_seconds(self, num_rows: int) -> float:
        return _on_curve(self.decode_steps, num_rows) if num_rows else 0.0

    def prefill_seconds(self, num_tokens: float) -> float:
        return num_tokens / self.prefill_tokens_per_second

    def chunk_seconds(self, num_tokens: int, num_forwards: int) -> float:
        """So many tokens in so many forwards, each by itself."""
        if not num_forwards:
            return 0.0
        each = num_tokens / num_forwards
        largest, _ = self.chunks[-1]
        seconds = _on_curve(self.chunks, each) + self.prefill_seconds(max(0, each - largest))
        return num_forwards * seconds

    def __str__(self) -> str:
        steps = ", ".join(f"{seconds * 1e3:.3g} ms at {n}" for n, seconds in self.decode_steps)
        chunks = ", ".join(f"{seconds * 1e3:.3g} ms of {n}" for n, seconds in self.chunks)
        return (
            f"One batch, in the same run: prefill {self.prefill_tokens_per_second:,.0f} tok/s; "
            f"decode steps of {steps} rows; forwards of {chunks} prompt tokens alone. A new "
            f"shape costs {self.new_prefill * 1e3:.3g} ms in prefill, "
            f"{self.new_decode * 1e3:.3g} ms in decode."
        )


def widths_to_measure(decode_rows: Iterable[int]) -> list[int]:
    """A few widths that cover all those that steps had: 1, 2, 4, ... and the widest."""
    widest = max(decode_rows, default=1) or 1
    return [n for n in (2**k for k in range(widest.bit_length())) if n < widest] + [widest]


def measure_rates(config: Config, widths: Sequence[int]) -> Rates:
    engine = replace(
        with_rows(without_usual_drafts(config.engine), max(widths)), prefix_cache=False
    )
    with TemporaryDirectory() as folder, LLM(config=replace(config, engine=engine)) as llm:
        log = llm.metrics.log = StepLog(Path(folder) / "steps")
        timings = []
        for width in widths:
            say(f"one batch of {width}")
            timings.append(time_batch(llm, width, CONTEXT, DECODE_TOKENS, REPEATS, choose=min))
        say("prompts by themselves")
        new_lengths = [_extra_of_new_length(llm, length) for length in NEW_LENGTHS]
        chunks = [(length, _forward_seconds(llm, length)) for length in CHUNKS]
        log.close()
        records = read_step_log(Path(folder) / "steps")
    decode_steps = {timing.batch: timing.decode_seconds for timing in timings}
    return Rates(
        decode_steps=tuple(decode_steps.items()),
        chunks=tuple(chunks),
        prefill_tokens_per_second=max(timing.prefill_tokens_per_second for timing in timings),
        new_prefill=max(0.0, median(new_lengths)),
        new_decode=max(0.0, median(_extra_of_new_steps(records, decode_steps))),
    )


def _forward_seconds(llm: LLM, num_tokens: int) -> float:
    """The device's time for a prompt by itself, of a length that is not new any more."""
    times = []
    for turn in range(1 + REPEATS):
        before = llm.metrics.records[-1]
        _ask(llm, num_tokens, turn)
        last = [record for record in llm.metrics.records if record.prefill_tokens][-1]
        if before.device is not None and last.device is not None:
            times.append(last.device.busy - before.device.busy)
        else:  # what launching does not hide
            times.append(last.resumed - last.launched)
    return min(times[1:])


def _extra_of_new_length(llm: LLM, num_tokens: int) -> float:
    """What the first prompt of a length takes longer than the next ones."""
    first, *later = (_ask(llm, num_tokens, turn) for turn in range(1 + REPEATS))
    return first - median(later)


def _ask(llm: LLM, num_tokens: int, turn: int) -> float:
    """Seconds from a lone prompt's plan to its token."""
    begun = last_step(llm)
    text = prompts_for(llm, f"lone {num_tokens} {turn}").text(num_tokens)
    generate(llm, [text], max_tokens=1)
    return first_token_seconds(llm, since_step=begun + 1)


def _extra_of_new_steps(records: Iterable[StepRecord], settled: Mapping[int, float]) -> list[float]:
    """What decode steps of a new shape took longer than settled ones of as many rows."""
    return [
        after.resumed - before.resumed - settled[after.decode_rows]
        for before, after in itertools.pairwise(records)
        if after.decode_rows in settled and not after.prefill_tokens and after.forwards.new_decode
        if after.step == before.step + 1 and not after.after_pause
    ] or [0.0]


def _on_curve(points: Points, x: float) -> float:
    xs, ys = zip(*points, strict=True)
    return float(np.interp(x, xs, ys))


@dataclass(frozen=True)
class Breakdown:
    """Seconds; together they are the wall time."""

    work: float = 0.0  # prompt tokens and decode steps, at the rates of one batch
    new_shapes: float = 0.0
    launching: float = 0.0
    idle_device: float = 0.0
    small_chunks: float = 0.0
    no_requests: float = 0.0
    rest: float = 0.0

    def __add__(self, other: Breakdown) -> Breakdown:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Breakdown(*(a + b for a, b in pairs))

    @property
    def wall(self) -> float:
        return float(sum(astuple(self)))

    @property
    def efficiency(self) -> float:
        """The time that the same work takes at one-batch rates, over the wall time."""
        return self.work / self.wall

    def named(self) -> Iterator[tuple[str, float]]:
        for field in fields(self):
            yield field.name.replace("_", " "), getattr(self, field.name)


@dataclass(frozen=True)
class Span:
    """One step's share of the wall time. Seconds."""

    record: StepRecord
    seconds: float
    idle: float | None  # of these the device had nothing to do; None where it is not known
    launching: float  # the host was planning a step or handing it over


def break_down(
    records: Sequence[StepRecord], rates: Rates, began: float, ended: float
) -> Breakdown:
    """The period from `began` to `ended`, on the records' own clock."""
    spans = list(_spans([r for r in records if r.planned >= began and r.resumed <= ended]))
    stepping = sum(span.seconds for span in spans)
    parts = (_explain(span, rates) for span in spans)
    found = sum(parts, Breakdown(no_requests=ended - began - stepping))
    return found + Breakdown(rest=ended - began - found.wall)


def _spans(records: Sequence[StepRecord]) -> Iterator[Span]:
    before: StepRecord | None = None
    owed = 0.0  # a device's account lags by a clock tick: too much idle time now is too little then
    for index, record in enumerate(records):
        begins = record.planned if before is None or record.after_pause else before.resumed
        seconds = record.resumed - begins
        idle = None
        if before is not None and before.device is not None and record.device is not None:
            owed += seconds - (record.device.busy - before.device.busy)
            idle = max(0.0, owed)
            owed -= idle
        launches = records[index : index + 2]  # this one's, and under overlap the next one's
        launching = sum(_overlap(r.planned, r.launched, begins, record.resumed) for r in launches)
        yield Span(record, seconds, idle, launching)
        before = record


def _overlap(start: float, end: float, since: float, until: float) -> float:
    return max(0.0, min(end, until) - max(start, since))


def _explain(span: Span, rates: Rates) -> Breakdown:
    record, ran = span.record, span.record.forwards
    prefill = rates.prefill_seconds(record.prefill_tokens)
    work = rates.decode_seconds(record.decode_rows) + prefill
    new_shapes = ran.new_prefill * rates.new_prefill + ran.new_decode * rates.new_decode
    idle = span.idle
    if idle is None:  # a device that the host waited for was busy; else it waited for the host
        idle = 0.0 if record.host_waited else span.seconds - work
    idle = max(0.0, idle - new_shapes)  # the device is idle, too, while a shape is new
    launching = min(idle, span.launching)
    chunks = rates.chunk_seconds(record.prefill_tokens, ran.prefill)
    return Breakdown(
        work=work,
        new_shapes=new_shapes,
        launching=launching,
        idle_device=idle - launching,
        small_chunks=max(0.0, chunks - prefill),
    )


EFFICIENCY_TARGET = 0.8


@dataclass(frozen=True)
class StepAccount:
    """What the step log of a started server adds."""

    rates: Rates
    breakdown: Breakdown
    num_steps: int


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
    return summarize(target.model, load, outcome, None, notes)


def _churn_here(config: Config, load: Load, seed: int, step_log: Path | None) -> Report:
    """The load against a server that is started here, then the rates of one batch on its model."""
    notes = busy_note()
    model_dir = find_checkpoint(config.model)
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
    asyncio.run(warm_up(client, prompts.beside("warm-up").text))
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
        ("prompts, tok/s", number(outcome.prompt_tokens / outcome.seconds)),
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


if __name__ == "__main__":
    run(churn, "model", "engine")
