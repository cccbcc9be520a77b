"""`GET /metrics` for Prometheus: the server's histograms, the engine's counters. Measures nothing.

The engine answers between two steps. Who asks waits for that a little, and then gets what was known
last, with its age: a step may take longer than a scrape may.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from time import monotonic
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from pippin.engine.engine_client import Engine
from pippin.errors import PippinError

PATIENCE_SECONDS = 1.0  # for the engine's answer; scrapes are often given up after ten


@dataclass(frozen=True)
class _Number:
    """A number of `Engine.counters`, found by its path; by component, if `labels` says so."""

    name: str
    help: str
    path: tuple[str, ...]
    labels: tuple[str, ...] = ()


GAUGES = (
    _Number("pippin_requests_running", "Sequences that have a slot.", ("running",)),
    _Number("pippin_requests_waiting", "Sequences in the queue.", ("waiting",)),
    _Number("pippin_slots", "Sequences that can run at a time.", ("slots",)),
    _Number(
        "pippin_device_idle_ratio",
        "Share of the last steps' time in which the device had nothing to do.",
        ("metrics", "device_idle_share"),
    ),
    _Number(
        "pippin_host_hidden_ratio",
        "Share of the host's work that was done while the device worked.",
        ("metrics", "host_hidden_share"),
    ),
    _Number("pippin_device_bytes", "Held on the device.", ("memory", "device_bytes")),
    _Number("pippin_budget_bytes", "For rows, captures and the cache.", ("memory", "budget_bytes")),
    _Number("pippin_claimed_bytes", "Of these, for rows.", ("memory", "claimed_bytes")),
    _Number(
        "pippin_cache_bytes",
        "Held by the prefix cache.",
        ("cache", "component_bytes"),
        ("component",),
    ),
    _Number("pippin_cache_capacity_bytes", "It may hold.", ("cache", "capacity_bytes")),
    _Number(
        "pippin_cache_evictable_bytes",
        "Of it, that nobody needs.",
        ("cache", "evictable_bytes"),
    ),
    _Number("pippin_cache_tokens", "Tokens in the tree.", ("cache", "tokens")),
    _Number("pippin_disk_bytes", "On disk, that can be restored.", ("disk", "nbytes")),
    _Number("pippin_disk_tree_tokens", "Tokens in the tree on disk.", ("disk", "tokens")),
    _Number("pippin_loading", "Requests that wait for the disk.", ("disk", "loading")),
    _Number("pippin_host_bytes", "In the host's memory, to be restored.", ("host", "nbytes")),
    _Number("pippin_host_tree_tokens", "Tokens in its tree.", ("host", "tokens")),
    _Number("pippin_host_loading", "Requests that wait for it.", ("host", "loading")),
)
COUNTERS = (
    _Number("pippin_steps", "Steps of the loop.", ("metrics", "steps")),
    _Number("pippin_prompt_tokens", "Of requests that started.", ("metrics", "prompt_tokens")),
    _Number("pippin_cached_tokens", "Of these, not computed.", ("metrics", "cached_tokens")),
    _Number("pippin_host_tokens", "Of these, from the host.", ("metrics", "host_tokens")),
    _Number("pippin_disk_tokens", "And read from disk.", ("metrics", "disk_tokens")),
    _Number(
        "pippin_computed_tokens",
        "Prompt tokens that were run, those of resumed replies too.",
        ("metrics", "computed_tokens"),
    ),
    _Number("pippin_generated_tokens", "Of replies.", ("metrics", "generated_tokens")),
    _Number("pippin_forced_tokens", "Of these, by a grammar.", ("metrics", "forced_tokens")),
    _Number(
        "pippin_retractions", "Running sequences that were taken back.", ("metrics", "retractions")
    ),
    _Number(
        "pippin_watch_failures",
        "Of what only looks on: the feed, a trace.",
        ("metrics", "watch_failures"),
    ),
    _Number("pippin_cache_lookups", "Prompts that were looked up.", ("cache", "lookups")),
    _Number("pippin_cache_hits", "Of these, with a match.", ("cache", "hits")),
    _Number(
        "pippin_cache_lookup_tokens", "Tokens that were looked up.", ("cache", "tokens_looked_up")
    ),
    _Number("pippin_cache_hit_tokens", "Of these, found.", ("cache", "tokens_matched")),
    _Number(
        "pippin_cache_damaged",
        "Payloads in memory that were not what they had been.",
        ("cache", "damaged"),
    ),
    _Number("pippin_cache_inserted_tokens", "New in the tree.", ("cache", "tokens_inserted")),
    _Number(
        "pippin_cache_evictions",
        "Payloads that were given up.",
        ("cache", "evictions"),
        ("component",),
    ),
    _Number("pippin_cache_evicted_bytes", "In them.", ("cache", "bytes_evicted")),
    _Number("pippin_host_loads", "Loads from the host's memory.", ("host", "loads")),
    _Number("pippin_host_loaded_bytes", "Copied for them.", ("host", "loaded_bytes")),
    _Number("pippin_host_late_loads", "Given up: too slow.", ("host", "late_loads")),
    _Number("pippin_host_failed_loads", "Given up for another reason.", ("host", "failed_loads")),
    _Number("pippin_host_spilled_bytes", "Copied to the host.", ("host", "spilled_bytes")),
    _Number(
        "pippin_host_unreadable_entries",
        "Entries there that were not what was copied.",
        ("host", "unreadable_entries"),
    ),
    _Number("pippin_disk_loads", "Loads from disk that were begun.", ("disk", "loads")),
    _Number("pippin_disk_loaded_bytes", "Read for them.", ("disk", "loaded_bytes")),
    _Number("pippin_disk_late_loads", "Given up: too slow.", ("disk", "late_loads")),
    _Number("pippin_disk_failed_loads", "Given up for another reason.", ("disk", "failed_loads")),
    _Number("pippin_disk_spilled_bytes", "Written to disk.", ("disk", "spilled_bytes")),
    _Number(
        "pippin_disk_unreadable_entries",
        "Entries that were not what was written.",
        ("disk", "unreadable_entries"),
    ),
)


class EngineCounters(Collector):
    """What the engine said last, and the question that is under way."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[str, Any] | None = None
        self._known_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Ask, and wait for the answer a little; one question at a time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait((self._asking,), timeout=PATIENCE_SECONDS)
        if self._asking.done():
            self._asking.result()

    async def _ask(self) -> None:
        try:
            self._known = await self._engine.counters()
            self._known_at = monotonic()
        except PippinError:  # `pippin_engine_up` says so; numbers of a lost engine mean nothing
            self._known = None

    def collect(self) -> Iterator[Metric]:
        up = self._engine.healthy
        yield GaugeMetricFamily("pippin_engine_up", "1 while there is an engine.", value=up)
        if not up or self._known is None:
            return
        yield GaugeMetricFamily(
            "pippin_engine_counters_age_seconds",
            "How old the engine's numbers are: it tells them between two steps.",
            value=monotonic() - self._known_at,
        )
        for number in GAUGES:
            yield from _family(GaugeMetricFamily, number, self._known)
        for number in COUNTERS:
            yield from _family(CounterMetricFamily, number, self._known)


class MetricsEndpoint:
    def __init__(self, engine: Engine, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._counters = EngineCounters(engine)
        registry.register(self._counters)

    async def show(self, request: Request) -> Response:
        await self._counters.refresh()
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), media_type=media_type)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    number: _Number,
    counters: dict[str, Any],
) -> Iterator[Metric]:
    if counters.get(number.path[0]) is None:  # no prefix cache, or none on disk
        return
    value: Any = reduce(operator.getitem, number.path, counters)
    family = kind(number.name, number.help, labels=number.labels)
    if number.labels:
        for label, part in value.items():
            family.add_metric([label], part)
    else:
        family.add_metric([], value)
    yield family
