"""Metrics of each model: with the label `model_name` where several are served. Knows no engine."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pippin.api.metered_engine import ReplyTimes
from pippin.api.served_models import ServedModel, ServedModels

LABEL = "model_name"  # vLLM's


class ModelMetrics(Collector):
    """A registry for each model; what they collect is exported as one."""

    def __init__(self, models: ServedModels) -> None:
        self._are_several = models.are_several
        self._registries = {model.info.name: CollectorRegistry() for model in models}
        self._times = {name: ReplyTimes(each) for name, each in self._registries.items()}
        for model in models:
            if model.info.on_demand:
                self._registries[model.info.name].register(_Residency(model))

    def times(self, name: str) -> ReplyTimes:
        return self._times[name]

    def add(self, name: str, collector: Collector) -> None:
        self._registries[name].register(collector)

    def collect(self) -> Iterator[Metric]:
        if not self._are_several:
            for registry in self._registries.values():
                yield from registry.collect()
            return
        families: dict[str, Metric] = {}
        for name, registry in self._registries.items():
            for family in registry.collect():
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={LABEL: name, **sample.labels})
                    for sample in family.samples
                ]
        yield from families.values()


class _Residency(Collector):
    """Of a model that is loaded by requests."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        found = self._model.residency
        yield GaugeMetricFamily(
            "pippin_model_requests_waiting",
            "Number of requests that wait for a model to be loaded.",
            value=found.num_waiting,
        )
        yield GaugeMetricFamily(
            "pippin_model_requests_open",
            "Number of requests that use a loaded model: it is not unloaded before they end.",
            value=found.num_open or 0,
        )
        yield CounterMetricFamily(
            "pippin_model_loads",
            "Number of times that a model was loaded.",
            value=found.num_loads,
        )
