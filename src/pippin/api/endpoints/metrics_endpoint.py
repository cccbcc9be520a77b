"""`GET /metrics` for Prometheus: the server's histograms, the engine's counters. Measures nothing.

The engine answers between two steps, and a step may take longer than a scrape may. So a scrape
waits a limited time for the engine, and then gets its latest numbers, with their age.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import monotonic, process_time
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from pippin.api.endpoints.deprecated_metrics import WithOldNames
from pippin.api.endpoints.model_metrics import ModelMetrics
from pippin.api.engine_families import engine_families, replica_families
from pippin.api.served_models import ServedModel, ServedModels
from pippin.errors import PippinError

PATIENCE_SECONDS = 1.0  # for the engine's answer; scrapes often time out after ten


class EngineCounters(Collector):
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._known: dict[str, Any] | None = None
        self._known_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        """Ask, and wait for the answer for a limited time; one question at a time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait((self._asking,), timeout=PATIENCE_SECONDS)
        if self._asking.done():
            self._asking.result()

    async def _ask(self) -> None:
        try:
            engine = self._model.engine
            self._known = None if engine is None else await engine.counters()
            self._known_at = monotonic()
        except PippinError:  # `pippin_engine_up` is 0; numbers of a lost engine mean nothing
            self._known = None

    def collect(self) -> Iterator[Metric]:
        engine = self._model.engine
        up = engine is not None and engine.healthy
        yield GaugeMetricFamily(
            "pippin_engine_up", "1 if the engine is running, 0 if it is not.", value=up
        )
        if not up or self._known is None:
            return
        yield GaugeMetricFamily(
            "pippin_engine_counters_age_seconds",
            "Age of the engine's numbers in this scrape: the engine answers between two steps.",
            value=monotonic() - self._known_at,
        )
        if (replicas := self._known.get("replicas")) is not None:
            yield from replica_families(replicas)
        else:
            yield from engine_families(self._known)


class ServerTime(Collector):
    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "pippin_server_cpu_seconds",
            "CPU seconds of the server process, which reads requests and writes replies.",
            value=process_time(),
        )


class MetricsEndpoint:
    def __init__(
        self, models: ServedModels, metrics: ModelMetrics, registry: CollectorRegistry
    ) -> None:
        """`registry`: of what concerns no single model."""
        self._counters = {model.info.name: EngineCounters(model) for model in models}
        for name, counters in self._counters.items():
            metrics.add(name, counters)
        registry.register(ServerTime())
        registry.register(metrics)
        self._exported = CollectorRegistry()
        self._exported.register(WithOldNames(registry))

    async def show(self, request: Request) -> Response:
        await asyncio.gather(*(counters.refresh() for counters in self._counters.values()))
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._exported), media_type=media_type)
