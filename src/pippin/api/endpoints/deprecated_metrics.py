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
    "pippin_prefix_cache_damaged_payloads": "pippin_cache_damaged",
    "pippin_kv_offload_used_bytes": "pippin_{tier}_bytes",
    "pippin_kv_offload_tokens": "pippin_{tier}_tree_tokens",
    "pippin_kv_offload_requests_loading": "pippin_{tier}_loading",
    "pippin_kv_offload_load_bytes": "pippin_{tier}_loaded_bytes",
    "pippin_kv_offload_store_bytes": "pippin_{tier}_spilled_bytes",
}
PREFIXES = {"pippin_prefix_cache_": "pippin_cache_", "pippin_kv_offload_": "pippin_{tier}_"}


class WithOldNames(Collector):
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            old = _old_name(family.name)
            old_families: dict[str, Metric] = {}
            for sample in family.samples if old != family.name else ():
                if sample.labels.get("tier") != "peer":  # it is newer than the old names
                    _add(old_families, family, sample, old)
            yield from old_families.values()


def _old_name(new: str) -> str:
    for prefix, old_prefix in PREFIXES.items():
        if new not in OLD_NAMES and new.startswith(prefix):
            return new.replace(prefix, old_prefix)
    return OLD_NAMES.get(new, new)


def _add(families: dict[str, Metric], family: Metric, sample: Sample, old: str) -> None:
    name = old.format(**sample.labels).replace("pippin_disk_loading", "pippin_loading")
    if name not in families:
        new = family.name + ("_total" if family.type == "counter" else "")
        text = f"Deprecated: use {new}. This old name is removed in the next release."
        families[name] = Metric(name, text, family.type)
    labels = {key: value for key, value in sample.labels.items() if key != "tier"}
    if (reason := labels.pop("finished_reason", None)) is not None:
        labels["finish"] = "cut" if reason == "abort" else reason
    old_name = name + sample.name.removeprefix(family.name)
    families[name].samples.append(sample._replace(name=old_name, labels=labels))
