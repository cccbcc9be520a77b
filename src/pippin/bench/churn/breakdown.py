"""Where a served load's time went, from step records and the rates of one batch.

Pure arithmetic: knows no server and no clock. A step's span is from the end of the one before it to
its own. Which of two steps that follow each other a second belongs to is blurred: nothing waits for
a chunk in the middle of a prompt, and a launch that is held up by a busy device delays the end of
the step before it. So every cause has a price, and only sums are reported.
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
