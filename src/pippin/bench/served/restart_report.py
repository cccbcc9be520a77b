"""What `pippin bench restart` found, as tables. Measures nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pippin.bench.results.plot import Bar, Bars, Goal
from pippin.bench.results.report import Report, Table, number
from pippin.bench.results.samples import median, ratio

RESTORED_SHARE = 0.10  # of the cold time: what a conversation may take after a restart
GAP_RATIO = 1.10  # p99 of gaps while writing, over the same without


@dataclass(frozen=True)
class Restarted:
    """Conversations before and after a server was ended. TTFT in seconds, medians."""

    how: str
    asked: int
    equal: int  # replies that said the same after the restart
    prompt_tokens: int
    cached_tokens: int
    cold_ttft: float
    restored_ttft: float
    damaged: int  # pieces of files that the second server found damaged
    computed: int  # prompts that it had on disk and would have read no sooner

    @property
    def share(self) -> float:
        return ratio(self.restored_ttft, self.cold_ttft)


@dataclass(frozen=True)
class Gaps:
    """99th percentiles of the gaps between a stream's tokens, in seconds, one of each round."""

    writing: list[float]
    plain: list[float]

    @property
    def ratio(self) -> float:
        return ratio(median(self.writing), median(self.plain))


@dataclass(frozen=True)
class SteadyLoad:
    """The most that was seen under a steady load, and what was allowed. Bytes."""

    seconds: float
    disk_bytes: int
    max_disk_bytes: int
    claimed_bytes: int  # rows, captures and tree in memory
    budget_bytes: int
    written_bytes: int
    kept_bytes: int
    evicted: int
    errors: int

    @property
    def within(self) -> bool:
        fits = self.disk_bytes <= self.max_disk_bytes
        return fits and self.claimed_bytes <= self.budget_bytes


def summarize(
    restarted: list[Restarted], gaps: Gaps | None, ceilings: SteadyLoad | None, notes: list[str]
) -> Report:
    tables: list[Table] = []
    charts: list[Bars] = []
    data: dict[str, Any] = {
        "restarts": [{**asdict(each), "share": each.share} for each in restarted]
    }
    if restarted:
        tables.append(_restart_table(restarted))
        charts.append(_restart_chart(restarted))
    if gaps is not None:
        tables.append(_gap_table(gaps))
        data["gaps"] = {**asdict(gaps), "ratio": gaps.ratio}
    if ceilings is not None:
        tables.append(_ceiling_table(ceilings))
        data["ceilings"] = {**asdict(ceilings), "within": ceilings.within}
    return Report("restart", tables, charts, data, notes)


def _restart_table(restarted: list[Restarted]) -> Table:
    title = (
        "Time to the first token of a conversation after a restart "
        f"(target: at most {RESTORED_SHARE:.0%} of cold)"
    )
    header = ("ended by", "prompt", "cached", "cold, ms", "restored, ms", "share", "same reply")
    rows: list[tuple[str, ...]] = [
        (
            {"sigterm": "SIGTERM", "kill": "kill -9 while writing"}[each.how],
            f"{each.prompt_tokens:,}",
            f"{each.cached_tokens:,}",
            number(each.cold_ttft * 1e3),
            number(each.restored_ttft * 1e3),
            f"{each.share:.1%}",
            f"{each.equal} of {each.asked}",
        )
        for each in restarted
    ]
    return Table(title, header, rows)


def _restart_chart(restarted: list[Restarted]) -> Bars:
    return Bars(
        "Time to the first token after a restart, as a share of cold",
        "% of the cold time",
        ("restored / cold",),
        [Bar(each.how, (each.share * 100,), f"{each.share:.1%}") for each in restarted],
        unit="%",
        target=Goal(RESTORED_SHARE * 100, f"target: at most {RESTORED_SHARE:.0%}"),
    )


def _gap_table(gaps: Gaps) -> Table:
    title = f"Gaps of running streams while prompts arrive (target: at most {GAP_RATIO:g}x)"
    row = (
        number(median(gaps.plain) * 1e3),
        number(median(gaps.writing) * 1e3),
        f"{gaps.ratio:.2f}x",
    )
    return Table(title, ("p99 without disk, ms", "p99 while writing, ms", "ratio"), [row])


def _ceiling_table(found: SteadyLoad) -> Table:
    header = ("", "most", "allowed", "share")
    rows: list[tuple[str, ...]] = [
        (name, f"{most:,}", f"{allowed:,}", f"{ratio(most, allowed):.1%}")
        for name, most, allowed in (
            ("bytes on disk", found.disk_bytes, found.max_disk_bytes),
            ("bytes in memory", found.claimed_bytes, found.budget_bytes),
            ("bytes written, of those kept", found.written_bytes, found.kept_bytes),
        )
    ]
    title = f"{found.seconds:g} s of new prompts: {found.evicted:,} evicted, {found.errors} failed"
    return Table(title, header, rows)
