"""`GET /metrics` for Prometheus: the server's histograms, the engine's counters.

The engine answers between two steps, and a step may take longer than a scrape may. So a scrape
waits a limited time for the engine, and then gets its latest numbers, with their age.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import asdict
from functools import partial, reduce
from time import monotonic, perf_counter, process_time
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from pippin.api.job import TIERS
from pippin.api.served_models import ServedModel, ServedModels
from pippin.engine.engine_client import RequestEngine
from pippin.errors import PippinError
from pippin.messages import Submit, TokenDelta
from pippin.types import FinishReason

WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5)
WHOLE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
SUCCESS: tuple[FinishReason, ...] = ("stop", "length")
LENGTH_BUCKETS = tuple(4**n for n in range(10))  # 1 to 262,144 tokens

ABORT: FinishReason = "abort"  # the client disconnected, or its request timed out


class ReplyTimes:
    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, buckets=buckets, registry=registry)

        self.queue = histogram(
            "pippin_request_queue_time_seconds",
            "Seconds that a request waited in the engine's queue before its first chunk.",
            WAIT_BUCKETS,
        )
        self.first_token = histogram(
            "pippin_time_to_first_token_seconds",
            "Seconds from submitting a request to the engine to its first token.",
            WAIT_BUCKETS,
        )
        self.inter_token = histogram(
            "pippin_inter_token_latency_seconds",
            "Seconds between successive tokens of a request; tokens of one step count as one.",
            GAP_BUCKETS,
        )
        self.whole = histogram(
            "pippin_e2e_request_latency_seconds",
            "Seconds from submitting a request to the engine to its end.",
            WHOLE_BUCKETS,
        )
        self.prompt_tokens = histogram(
            "pippin_request_prompt_tokens", "Number of prompt tokens of a request.", LENGTH_BUCKETS
        )
        self.generation_tokens = histogram(
            "pippin_request_generation_tokens",
            "Number of generated tokens of a request.",
            LENGTH_BUCKETS,
        )
        counter = partial(Counter, labelnames=["finished_reason"], registry=registry)
        self.requests = counter(
            "pippin_requests", "Number of requests that ended, by finish reason."
        )
        self.successes = counter(
            "pippin_request_success",
            "Number of requests that ended with a complete reply, by finish reason.",
        )
        # Samples start at 0, so that `rate()` sees the first request of each reason.
        for reason in get_args(FinishReason):
            self.requests.labels(reason)
        for reason in SUCCESS:
            self.successes.labels(reason)


class MeteredEngine:
    """The same engine, with its replies timed."""

    def __init__(self, engine: RequestEngine, times: ReplyTimes) -> None:
        self._engine = engine
        self._times = times
        self._open: dict[str, _TimedRequest] = {}

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        request = self._open[submit.id] = _TimedRequest(self._times, submit.prompt_len)
        try:
            async with aclosing(self._engine.generate(submit)) as deltas:
                async for delta in deltas:
                    request.note(delta)
                    if delta.finish is not None:
                        self._end(submit.id, delta.finish)
                    yield delta
        finally:
            self._end(submit.id, ABORT)

    def finish(self, id: str) -> None:
        self._end(id, "stop")  # by a stop string, which the engine does not report
        self._engine.finish(id)

    def _end(self, id: str, finish: FinishReason) -> None:
        if (request := self._open.pop(id, None)) is not None:
            request.end(finish)


class _TimedRequest:
    def __init__(self, times: ReplyTimes, prompt_len: int) -> None:
        self._times = times
        self._began = perf_counter()
        self._last: float | None = None  # when its latest tokens arrived
        self._num_tokens = 0
        times.prompt_tokens.observe(prompt_len)

    def note(self, delta: TokenDelta) -> None:
        if delta.queued_s is not None:
            self._times.queue.observe(delta.queued_s)
        if not delta.tokens:
            return
        now = perf_counter()
        if self._last is None:
            self._times.first_token.observe(now - self._began)
        else:
            self._times.inter_token.observe(now - self._last)
        self._last = now
        self._num_tokens += len(delta.tokens)

    def end(self, finish: FinishReason) -> None:
        self._times.whole.observe(perf_counter() - self._began)
        self._times.generation_tokens.observe(self._num_tokens)
        self._times.requests.labels(finish).inc()
        if finish in SUCCESS:
            self._times.successes.labels(finish).inc()


REPLICA, MODEL_NAME = "replica", "model_name"  # labels; the second is vLLM's
PATIENCE_SECONDS = 1.0  # for the engine's answer; scrapes often time out after ten

# Each metric, its path in `Engine.counters`, and its help. A path with {tier} or {drafter} has a
# value for each of them; a mapping has one for each component, and a list one for each position.
GAUGES = """\
pippin_num_requests_running = running
    Number of requests that have a slot in the running batch.
pippin_num_requests_waiting = waiting
    Number of requests that wait: in the queue, for a grammar or for a load.
pippin_slots = slots
    Number of requests that can run at the same time.
pippin_device_idle_ratio = metrics.device_idle_share
    Share of time in which the device had no work, over the last 512 steps.
pippin_host_hidden_ratio = metrics.host_hidden_share
    Share of the host's work that overlapped with the device's, over the last 512 steps.
pippin_device_bytes = memory.device_bytes
    Bytes allocated on the device, including the weights.
pippin_budget_bytes = memory.budget_bytes
    Bytes of the memory budget that running requests and the prefix cache share.
pippin_claimed_bytes = memory.claimed_bytes
    Bytes of the memory budget that running requests have claimed.
pippin_prefix_cache_bytes = cache.component_bytes
    Bytes in the prefix cache in device memory, by component.
pippin_prefix_cache_capacity_bytes = cache.capacity_bytes
    Bytes that the prefix cache in device memory may use now.
pippin_prefix_cache_evictable_bytes = cache.evictable_bytes
    Bytes in the prefix cache that no request uses, so that they can be evicted.
pippin_prefix_cache_tokens = cache.tokens
    Number of tokens in the prefix cache in device memory.
pippin_kv_offload_used_bytes = {tier}.nbytes
    Bytes of cached prefixes in a lower tier, by tier.
pippin_kv_offload_tokens = {tier}.tokens
    Number of tokens of cached prefixes in a lower tier, by tier.
pippin_kv_offload_requests_loading = {tier}.loading
    Number of requests that wait for a load from a lower tier, by tier.
pippin_handover_peers = peer.num_connected
    Number of prefill engines that this decode engine is connected to.
"""
COUNTERS = """\
pippin_engine_cpu_seconds = cpu_seconds
    CPU seconds of the engine process, all threads.
pippin_steps = metrics.steps
    Number of steps that the engine ran.
pippin_prompt_tokens = metrics.prompt_tokens
    Number of prompt tokens in requests that the engine accepted.
pippin_prompt_tokens_cached = metrics.cached_tokens
    Number of prompt tokens that were restored from any tier of the prefix cache.
pippin_prompt_tokens_loaded = metrics.{tier}_tokens
    Number of prompt tokens that were restored from a lower tier, by tier.
pippin_computed_tokens = metrics.computed_tokens
    Number of tokens that prefill computed, including replies of preempted requests.
pippin_generation_tokens = metrics.generated_tokens
    Number of generated tokens.
pippin_forced_tokens = metrics.forced_tokens
    Number of generated tokens that a grammar determined without sampling.
pippin_spec_decode_num_drafts = metrics.drafters.{drafter}.rows
    Number of times that a request had drafts in a step, by drafter.
pippin_spec_decode_num_draft_tokens = metrics.drafters.{drafter}.drafted
    Number of drafts that steps verified, by drafter.
pippin_spec_decode_num_accepted_tokens = metrics.drafters.{drafter}.accepted
    Number of drafts that were accepted as tokens of replies, by drafter.
pippin_spec_decode_num_accepted_tokens_per_pos = metrics.drafters.{drafter}.accepted_at
    Number of drafts that were accepted, by drafter and position; 0 is the first draft of a step.
pippin_num_preemptions = metrics.preemptions
    Number of times that a running request was preempted and returned to the queue.
pippin_watch_failures = metrics.watch_failures
    Number of failures of the event feed or a trace, which the engine survived.
pippin_prefix_cache_queries = cache.tokens_looked_up
    Number of prompt tokens that were looked up in the prefix cache.
pippin_prefix_cache_hits = cache.tokens_matched
    Number of prompt tokens that were found in the prefix cache.
pippin_prefix_cache_lookup_requests = cache.lookups
    Number of requests whose prompt was looked up in the prefix cache.
pippin_prefix_cache_hit_requests = cache.hits
    Number of requests of whose prompt the prefix cache had at least one token.
pippin_prefix_cache_inserted_tokens = cache.tokens_inserted
    Number of tokens that were inserted into the prefix cache.
pippin_prefix_cache_evictions = cache.evictions
    Number of payloads that were evicted from the prefix cache, by component.
pippin_prefix_cache_evicted_bytes = cache.bytes_evicted
    Bytes that were evicted from the prefix cache.
pippin_prefix_cache_damaged_payloads = cache.damaged
    Number of payloads in the prefix cache whose fingerprint had changed.
pippin_kv_offload_loads = {tier}.loads
    Number of loads that were started from a lower tier, by tier.
pippin_kv_offload_load_bytes = {tier}.loaded_bytes
    Bytes that were loaded from a lower tier, by tier.
pippin_kv_offload_late_loads = {tier}.late_loads
    Number of loads from a lower tier that were cancelled because computing was faster.
pippin_kv_offload_failed_loads = {tier}.failed_loads
    Number of loads from a lower tier that failed, by tier.
pippin_kv_offload_store_bytes = {tier}.spilled_bytes
    Bytes that were written to a lower tier, by tier.
pippin_kv_offload_unreadable_entries = {tier}.unreadable_entries
    Number of entries in a lower tier that did not verify when they were read, by tier.
pippin_handover_asked = peer.handovers.asked
    Number of prompts that this decode engine asked prefill engines for.
pippin_handover_arrived = peer.handovers.arrived
    Number of prompts of which prefill engines sent everything that was missing.
pippin_handover_partial = peer.handovers.partial
    Number of prompts that prefill engines refused, or disconnected before they had sent all.
pippin_handover_late = peer.handovers.late
    Number of prompts that were computed here because prefill engines were late.
pippin_handover_wait_seconds = peer.handovers.waited_seconds
    Time for which prompts of prefill engines were waited for, in seconds and summed.
pippin_handover_received_bytes = peer.handovers.arrived_bytes
    Bytes of prompts that arrived from prefill engines.
pippin_handover_pushes = pushes.asked
    Number of prompts that decode engines asked this prefill engine for.
pippin_handover_pushes_sent = pushes.sent
    Number of prompts of which everything was sent to a decode engine.
pippin_handover_pushes_failed = pushes.failed
    Number of prompts that ended before everything was sent to a decode engine.
pippin_handover_pushes_refused = pushes.refused
    Number of prompts of decode engines that were refused, because the queue was full for example.
pippin_handover_sent_bytes = pushes.sent_bytes
    Bytes of prompts that were sent to decode engines.
"""


MODEL_GAUGES = """\
pippin_model_requests_waiting = model.num_waiting
    Number of requests that wait for a model to be loaded.
pippin_model_requests_open = model.num_open
    Number of requests that use a loaded model: it is not unloaded before they end.
"""
MODEL_COUNTERS = """\
pippin_model_loads = model.num_loads
    Number of times that a model was loaded.
"""


def _families(table: str, counters: dict[str, Any]) -> Iterator[Metric]:
    lines = table.splitlines()
    kind = CounterMetricFamily if table in (COUNTERS, MODEL_COUNTERS) else GaugeMetricFamily
    for row, help in zip(lines[::2], lines[1::2], strict=True):
        name, path = row.split(" = ")
        labels, values = _samples(path, counters)
        if any(isinstance(value, list) for value in values.values()):
            labels = [*labels, "position"]
            values = {
                (*key, str(position)): value
                for key, counts in values.items()
                for position, value in enumerate(counts)
            }
        if values:
            family = kind(name, help.strip(), labels=labels)
            for key, value in values.items():
                family.add_metric(key, value)
            yield family


def _samples(path: str, counters: dict[str, Any]) -> tuple[list[str], dict[tuple[str, ...], Any]]:
    """Labels, and values by theirs; none without a prefix cache, a lower tier or a drafter."""
    for label in ("tier", "drafter"):
        if f"{{{label}}}" in path:
            tiers = (tier for tier in TIERS if counters.get(tier) is not None)
            names = tiers if label == "tier" else counters["metrics"]["drafters"]
            return [label], {(n,): _value(path.format(**{label: n}), counters) for n in names}
    if counters.get(path.partition(".")[0]) is None:
        return [], {}
    if isinstance(value := _value(path, counters), dict):
        return ["component"], {(part,): count for part, count in value.items()}
    return [], {(): value}


def _value(path: str, counters: dict[str, Any]) -> Any:
    return reduce(operator.getitem, path.split("."), counters)


def engine_families(counters: dict[str, Any]) -> Iterator[Metric]:
    memory = counters["memory"]
    yield GaugeMetricFamily(
        "pippin_kv_cache_usage_perc",
        "Share of the memory budget that running requests use; 1 means 100 percent.",
        value=1 - memory["available_bytes"] / max(1, memory["budget_bytes"]),
    )
    for table in (GAUGES, COUNTERS):
        yield from _families(table, counters)


def merged(label: str, parts: Iterable[tuple[str, Iterable[Metric]]]) -> Iterator[Metric]:
    """The same families of several, each sample with the label's value of its part."""
    families: dict[str, Metric] = {}
    for value, part in parts:
        for family in part:
            whole = Metric(family.name, family.documentation, family.type)
            families.setdefault(family.name, whole).samples += [
                sample._replace(labels={label: value, **sample.labels}) for sample in family.samples
            ]
    yield from families.values()


class ModelMetrics(Collector):
    """Of one model: its replies' times, whether it is loaded, and its engine's numbers."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self.times = ReplyTimes(self._registry)
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
        yield from self._registry.collect()
        if self._model.info.on_demand:
            found = {"model": asdict(self._model.residency)}
            yield from _families(MODEL_GAUGES, found)
            yield from _families(MODEL_COUNTERS, found)
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
        if (replicas := self._known.get("replicas")) is None:
            yield from engine_families(self._known)
            return
        replica_up = GaugeMetricFamily(
            "pippin_replica_up", "1 if the engine of this replica is running.", labels=[REPLICA]
        )
        for number, counters in enumerate(replicas):
            replica_up.add_metric([str(number)], counters is not None)
        yield replica_up
        yield from merged(
            REPLICA,
            (
                (str(number), engine_families(counters))
                for number, counters in enumerate(replicas)
                if counters is not None
            ),
        )


class ServerMetrics(Collector):
    """Of all models. `registry` has what concerns none of them, and is what is exported."""

    def __init__(self, models: ServedModels) -> None:
        self.registry = CollectorRegistry()
        self._of_models = {model.info.name: ModelMetrics(model) for model in models}
        self.registry.register(self)

    def times(self, name: str) -> ReplyTimes:
        return self._of_models[name].times

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "pippin_server_cpu_seconds",
            "CPU seconds of the server process, which reads requests and writes replies.",
            value=process_time(),
        )
        if len(self._of_models) > 1:
            parts = ((name, model.collect()) for name, model in self._of_models.items())
            yield from merged(MODEL_NAME, parts)
        else:
            for model in self._of_models.values():
                yield from model.collect()

    async def show(self, request: Request) -> Response:
        await asyncio.gather(*(model.refresh() for model in self._of_models.values()))
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.registry), media_type=media_type)
