"""Time to first token of prompts without and with a cache, as a table. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pippin.bench.client.sse import TimedReply
from pippin.bench.results.report import Table, number
from pippin.bench.results.samples import median, ratio


@dataclass(frozen=True)
class ColdWarm:
    """The same prompts without and with a cache. TTFT in seconds, medians."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    cold_ttft: float
    warm_ttft: float
    share: float

    @classmethod
    def of(cls, name: str, cold: Sequence[TimedReply], warm: Sequence[TimedReply]) -> ColdWarm:
        cold_ttft, warm_ttft = (median([reply.ttft for reply in side]) for side in (cold, warm))
        return cls(
            name=name,
            prompt_tokens=warm[0].prompt_tokens or 0,
            cached_tokens=int(median([reply.cached_tokens or 0 for reply in warm])),
            cold_ttft=cold_ttft,
            warm_ttft=warm_ttft,
            share=ratio(warm_ttft, cold_ttft),
        )


def cold_warm_table(title: str, rows: Sequence[ColdWarm], most: float) -> Table:
    """`most`: the share of the cold time that is the target."""
    return Table(
        f"{title} (target: at most {most:.0%} of cold)",
        ("prompts", "tokens", "cached", "cold TTFT, ms", "warm TTFT, ms", "warm / cold"),
        [
            (
                row.name,
                f"{row.prompt_tokens:,}",
                f"{row.cached_tokens:,}",
                number(row.cold_ttft * 1e3),
                number(row.warm_ttft * 1e3),
                f"{row.share:.1%}",
            )
            for row in rows
        ],
    )
