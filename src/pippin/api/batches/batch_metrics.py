"""Numbers of batches, for Prometheus. Counts nothing by itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

RESULTS = {"output": "completed", "errors": "failed"}


class BatchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = Gauge(
            "pippin_batches_unfinished",
            "Number of batches of /v1/batches that are being checked, wait or run.",
            registry=registry,
        )
        self._requests = Counter(
            "pippin_batch_requests",
            "Number of requests in batches that have a result, by result.",
            labelnames=["result"],
            registry=registry,
        )
        for result in RESULTS.values():
            self._requests.labels(result)

    def count(self, kind: str) -> None:
        self._requests.labels(RESULTS[kind]).inc()
