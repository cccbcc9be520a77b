"""Old names of metrics, exported beside the new ones for one release. Knows no engine.

To end the deprecation, delete this file and the registry that `MetricsEndpoint` wraps in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OLD_NAMES = {  # by the new name; a label in braces was part of the old name
    "pippin_num_requests_running": "pippin_requests_running",
    "pippin_num_requests_waiting": "pippin_requests_waiting",
    "pippin_requests": "pippin_sequences",
    "pippin_request_queue_time_seconds": "pippin_queue_seconds",
    "pippin_inter_token_latency_seconds": "pippin_token_gap_seconds",
    "pippin_e2e_request_latency_seconds": "pippin_sequence_seconds",
    "pippin_request_prompt_tokens": "pippin_sequence_prompt_tokens",
    "pippin_request_generation_tokens": "pippin_sequence_reply_tokens",
    "pippin_prompt_tokens_cached": "pippin_cached_tokens",
    "pippin_prompt_tokens_loaded": "pippin_{tier}_tokens",
    "pippin_generation_tokens": "pippin_generated_tokens",
    "pippin_num_preemptions": "pippin_retractions",
    "pippin_prefix_cache_queries": "pippin_cache_lookup_tokens",
    "pippin_prefix_cache_hits": "pippin_cache_hit_tokens",
    "pippin_prefix_cache_lookup_requests": "pippin_cache_lookups",
    "pippin_prefix_cache_hit_requests": "pippin_cache_hits",
    "pippin_prefix_cache_bytes": "pippin_cache_bytes",
    "pippin_prefix_cache_capacity_bytes": "pippin_cache_capacity_bytes",
    "pippin_prefix_cache_evictable_bytes": "pippin_cache_evictable_bytes",
    "pippin_prefix_cache_tokens": "pippin_cache_tokens",
    "pippin_prefix_cache_inserted_tokens": "pippin_cache_inserted_tokens",
    "pippin_prefix_cache_evictions": "pippin_cache_evictions",
    "pippin_prefix_cache_evicted_bytes": "pippin_cache_evicted_bytes",
    "pippin_prefix_cache_damaged_payloads": "pippin_cache_damaged",
    "pippin_kv_offload_used_bytes": "pippin_{tier}_bytes",
    "pippin_kv_offload_tokens": "pippin_{tier}_tree_tokens",
    "pippin_kv_offload_requests_loading": "pippin_{tier}_loading",
    "pippin_kv_offload_loads": "pippin_{tier}_loads",
    "pippin_kv_offload_load_bytes": "pippin_{tier}_loaded_bytes",
    "pippin_kv_offload_late_loads": "pippin_{tier}_late_loads",
    "pippin_kv_offload_failed_loads": "pippin_{tier}_failed_loads",
    "pippin_kv_offload_store_bytes": "pippin_{tier}_spilled_bytes",
    "pippin_kv_offload_unreadable_entries": "pippin_{tier}_unreadable_entries",
}
IRREGULAR = {"pippin_disk_loading": "pippin_loading"}


class WithOldNames(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            if family.name in OLD_NAMES:
                yield from _under_old_names(family)


def _under_old_names(family: Metric) -> Iterator[Metric]:
    new = family.name + ("_total" if family.type == "counter" else "")
    old = OLD_NAMES[family.name]
    families: dict[str, Metric] = {}
    for sample in family.samples:
        name = old.format(**sample.labels)
        name = IRREGULAR.get(name, name)
        if name not in families:
            text = f"Deprecated: use {new}. This old name is removed in the next release."
            families[name] = Metric(name, text, family.type)
        families[name].samples.append(
            sample._replace(
                name=name + sample.name.removeprefix(family.name), labels=_old_labels(sample, old)
            )
        )
    yield from families.values()


def _old_labels(sample: Sample, old: str) -> dict[str, str]:
    labels = {k: v for k, v in sample.labels.items() if f"{{{k}}}" not in old}
    if (reason := labels.pop("finished_reason", None)) is not None:
        labels["finish"] = "cut" if reason == "abort" else reason
    return labels
