"""Where a served load's time went, from step records and the rates of one batch.

Pure arithmetic: knows no server and no clock. A step's span is from the end of the one before it to
its own; what it took beyond its work at one-batch rates is put down to causes, in the order of
`Breakdown`'s fields, each at most as much as is left. So all of it adds up to the wall time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields

from pippin.bench.churn.rates import Rates
from pippin.metrics import StepRecord


@dataclass(frozen=True)
class Breakdown:
    """Seconds; together they are the wall time."""

    work: float = 0.0  # prompt tokens and decode steps, at the rates of one batch
    new_shapes: float = 0.0
    launching: float = 0.0
    idle_device: float = 0.0
    small_chunks: float = 0.0
    scattered_cohorts: float = 0.0
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
    idle: float | None  # of these the device had nothing to do; None where nobody knows
    launching: float  # the host was planning a step or handing it over


def break_down(
    records: Sequence[StepRecord], rates: Rates, began: float, ended: float
) -> Breakdown:
    """The period from `began` to `ended`, on the records' own clock."""
    spans = list(_spans([r for r in records if r.planned >= began and r.resumed <= ended]))
    stepping = sum(span.seconds for span in spans)
    total = Breakdown(no_requests=ended - began - stepping)
    ahead = 0.0
    for span in spans:
        part, ahead = _explain(span, rates, ahead)
        total += part
    return total + Breakdown(rest=ahead)


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


def _explain(span: Span, rates: Rates, ahead: float) -> tuple[Breakdown, float]:
    """The causes of a step's excess, and what it was ahead of its work.

    Tokens of running streams are there before the step's prompts are computed, and nothing waits
    for a chunk in the middle of a prompt: then its time falls into the next step's span.
    """
    record, ran = span.record, span.record.forwards
    tokens = record.prefill_tokens
    work = rates.decode_seconds(record.decode_rows) + rates.prefill_seconds(tokens)
    left = Remainder(span.seconds - work + ahead)
    new_shapes = left.take(ran.new_prefill * rates.new_prefill + ran.new_decode * rates.new_decode)
    # Where no account is kept: a host that had to wait for the device kept it busy, and one that
    # did not is what the device waited for.
    unknown = 0.0 if record.host_waited else left.seconds
    idle = left.take(unknown if span.idle is None else span.idle)
    launching = min(idle, span.launching)
    chunks = rates.chunk_seconds(tokens, ran.prefill) - rates.prefill_seconds(tokens)
    small_chunks = left.take(chunks if ran.prefill else 0.0)
    ahead = min(0.0, left.seconds) if tokens else 0.0
    unexplained = left.seconds - ahead
    scattered = unexplained if ran.cohorts > 1 else 0.0
    part = Breakdown(
        work=work,
        new_shapes=new_shapes,
        launching=launching,
        idle_device=idle - launching,
        small_chunks=small_chunks,
        scattered_cohorts=scattered,
        rest=unexplained - scattered,
    )
    return part, ahead


@dataclass
class Remainder:
    """Seconds that nothing has been found for yet. Below zero: faster than one batch."""

    seconds: float

    def take(self, wanted: float) -> float:
        taken = max(0.0, min(wanted, self.seconds))
        self.seconds -= taken
        return taken
