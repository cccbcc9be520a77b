"""The engine's counters as metric families for Prometheus. Asks no engine, and knows no HTTP."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

TIERS = ("host", "disk")  # of the prefix cache, below the device's memory


@dataclass(frozen=True)
class _Number:
    """A number of `Engine.counters`, found by its path.

    Labelled `component`, it is a mapping there. Labelled `tier`, it is at one path for each tier.
    """

    name: str
    help: str
    path: tuple[str, ...]
    label: str | None = None


GAUGES = (
    _Number(
        "pippin_num_requests_running",
        "Number of requests that have a slot in the running batch.",
        ("running",),
    ),
    _Number(
        "pippin_num_requests_waiting",
        "Number of requests that wait: in the queue, for a grammar or for a load.",
        ("waiting",),
    ),
    _Number("pippin_slots", "Number of requests that can run at the same time.", ("slots",)),
    _Number(
        "pippin_device_idle_ratio",
        "Share of time in which the device had no work, over the last 512 steps.",
        ("metrics", "device_idle_share"),
    ),
    _Number(
        "pippin_host_hidden_ratio",
        "Share of the host's work that overlapped with the device's, over the last 512 steps.",
        ("metrics", "host_hidden_share"),
    ),
    _Number(
        "pippin_device_bytes",
        "Bytes allocated on the device, including the weights.",
        ("memory", "device_bytes"),
    ),
    _Number(
        "pippin_budget_bytes",
        "Bytes of the memory budget that running requests and the prefix cache share.",
        ("memory", "budget_bytes"),
    ),
    _Number(
        "pippin_claimed_bytes",
        "Bytes of the memory budget that running requests have claimed.",
        ("memory", "claimed_bytes"),
    ),
    _Number(
        "pippin_prefix_cache_bytes",
        "Bytes in the prefix cache in device memory, by component.",
        ("cache", "component_bytes"),
        "component",
    ),
    _Number(
        "pippin_prefix_cache_capacity_bytes",
        "Bytes that the prefix cache in device memory may use now.",
        ("cache", "capacity_bytes"),
    ),
    _Number(
        "pippin_prefix_cache_evictable_bytes",
        "Bytes in the prefix cache that no request uses, so that they can be evicted.",
        ("cache", "evictable_bytes"),
    ),
    _Number(
        "pippin_prefix_cache_tokens",
        "Number of tokens in the prefix cache in device memory.",
        ("cache", "tokens"),
    ),
    _Number(
        "pippin_kv_offload_used_bytes",
        "Bytes of cached prefixes in a lower tier, by tier.",
        ("{tier}", "nbytes"),
        "tier",
    ),
    _Number(
        "pippin_kv_offload_tokens",
        "Number of tokens of cached prefixes in a lower tier, by tier.",
        ("{tier}", "tokens"),
        "tier",
    ),
    _Number(
        "pippin_kv_offload_requests_loading",
        "Number of requests that wait for a load from a lower tier, by tier.",
        ("{tier}", "loading"),
        "tier",
    ),
)
COUNTERS = (
    _Number("pippin_steps", "Number of steps that the engine ran.", ("metrics", "steps")),
    _Number(
        "pippin_prompt_tokens",
        "Number of prompt tokens in requests that the engine accepted.",
        ("metrics", "prompt_tokens"),
    ),
    _Number(
        "pippin_prompt_tokens_cached",
        "Number of prompt tokens that were restored from any tier of the prefix cache.",
        ("metrics", "cached_tokens"),
    ),
    _Number(
        "pippin_prompt_tokens_loaded",
        "Number of prompt tokens that were restored from a lower tier, by tier.",
        ("metrics", "{tier}_tokens"),
        "tier",
    ),
    _Number(
        "pippin_computed_tokens",
        "Number of tokens that prefill computed, including replies of preempted requests.",
        ("metrics", "computed_tokens"),
    ),
    _Number(
        "pippin_generation_tokens",
        "Number of generated tokens.",
        ("metrics", "generated_tokens"),
    ),
    _Number(
        "pippin_forced_tokens",
        "Number of generated tokens that a grammar determined without sampling.",
        ("metrics", "forced_tokens"),
    ),
    _Number(
        "pippin_num_preemptions",
        "Number of times that a running request was preempted and returned to the queue.",
        ("metrics", "preemptions"),
    ),
    _Number(
        "pippin_watch_failures",
        "Number of failures of the event feed or a trace, which the engine survived.",
        ("metrics", "watch_failures"),
    ),
    _Number(
        "pippin_prefix_cache_queries",
        "Number of prompt tokens that were looked up in the prefix cache.",
        ("cache", "tokens_looked_up"),
    ),
    _Number(
        "pippin_prefix_cache_hits",
        "Number of prompt tokens that were found in the prefix cache.",
        ("cache", "tokens_matched"),
    ),
    _Number(
        "pippin_prefix_cache_lookup_requests",
        "Number of requests whose prompt was looked up in the prefix cache.",
        ("cache", "lookups"),
    ),
    _Number(
        "pippin_prefix_cache_hit_requests",
        "Number of requests of whose prompt the prefix cache had at least one token.",
        ("cache", "hits"),
    ),
    _Number(
        "pippin_prefix_cache_inserted_tokens",
        "Number of tokens that were inserted into the prefix cache.",
        ("cache", "tokens_inserted"),
    ),
    _Number(
        "pippin_prefix_cache_evictions",
        "Number of payloads that were evicted from the prefix cache, by component.",
        ("cache", "evictions"),
        "component",
    ),
    _Number(
        "pippin_prefix_cache_evicted_bytes",
        "Bytes that were evicted from the prefix cache.",
        ("cache", "bytes_evicted"),
    ),
    _Number(
        "pippin_prefix_cache_damaged_payloads",
        "Number of payloads in the prefix cache whose fingerprint had changed.",
        ("cache", "damaged"),
    ),
    _Number(
        "pippin_kv_offload_loads",
        "Number of loads that were started from a lower tier, by tier.",
        ("{tier}", "loads"),
        "tier",
    ),
    _Number(
        "pippin_kv_offload_load_bytes",
        "Bytes that were loaded from a lower tier, by tier.",
        ("{tier}", "loaded_bytes"),
        "tier",
    ),
    _Number(
        "pippin_kv_offload_late_loads",
        "Number of loads from a lower tier that were cancelled because computing was faster.",
        ("{tier}", "late_loads"),
        "tier",
    ),
    _Number(
        "pippin_kv_offload_failed_loads",
        "Number of loads from a lower tier that failed, by tier.",
        ("{tier}", "failed_loads"),
        "tier",
    ),
    _Number(
        "pippin_kv_offload_store_bytes",
        "Bytes that were written to a lower tier, by tier.",
        ("{tier}", "spilled_bytes"),
        "tier",
    ),
    _Number(
        "pippin_kv_offload_unreadable_entries",
        "Number of entries in a lower tier that did not verify when they were read, by tier.",
        ("{tier}", "unreadable_entries"),
        "tier",
    ),
)


def engine_families(counters: dict[str, Any]) -> Iterator[Metric]:
    """Of what `Engine.counters` returned."""
    memory = counters["memory"]
    yield GaugeMetricFamily(
        "pippin_kv_cache_usage_perc",
        "Share of the memory budget that running requests use; 1 means 100 percent.",
        value=1 - memory["available_bytes"] / max(1, memory["budget_bytes"]),
    )
    for number in GAUGES:
        yield from _family(GaugeMetricFamily, number, counters)
    for number in COUNTERS:
        yield from _family(CounterMetricFamily, number, counters)


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    number: _Number,
    counters: dict[str, Any],
) -> Iterator[Metric]:
    """One family; none without a prefix cache, or without a lower tier."""
    values: dict[tuple[str, ...], Any]  # by the label's value
    if number.label == "tier":
        tiers = [tier for tier in TIERS if counters.get(tier) is not None]
        values = {(tier,): _value(counters, number.path, tier) for tier in tiers}
    elif counters.get(number.path[0]) is None:
        values = {}
    elif number.label is None:
        values = {(): _value(counters, number.path)}
    else:
        values = {(part,): value for part, value in _value(counters, number.path).items()}
    if values:
        family = kind(number.name, number.help, labels=[number.label] if number.label else [])
        for labels, value in values.items():
            family.add_metric(labels, value)
        yield family


def _value(counters: dict[str, Any], path: tuple[str, ...], tier: str = "") -> Any:
    return reduce(operator.getitem, [part.format(tier=tier) for part in path], counters)
