"""`/metrics`, read by prometheus_client's own parsers, and by the documents and the dashboard."""

from __future__ import annotations

import asyncio
import re
from typing import Any, get_args

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from scripted_engine import Script, ScriptedEngine, fail, hang, say, serving

from builders import Client, make_loop
from memory_store import MemoryStore
from metric_names import (
    dashboard,
    documented,
    documented_status_fields,
    families,
    names_in_dashboard,
)
from peers import Wire, add_peer_tier, add_pushes
from pippin.api.endpoints import metrics_endpoint as metrics
from pippin.backends.fake import FakeBackend
from pippin.cache.host_store import HostStore
from pippin.cache.tiers.tier_io import plain_memory
from pippin.scheduler.loop import Loop
from pippin.types import FinishReason

CHAT = {"model": "stories", "messages": [{"role": "user", "content": "Hi."}]}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def engine_after_a_run(*scripts: Script, cache: bool = True, depth: int = 0) -> ScriptedEngine:
    """Reports what a real loop counted over two requests with the same prompt."""
    backend = FakeBackend(max_depth=depth, num_slots=256)
    client = Client(make_loop(backend=backend, cache=cache, suffix_depth=depth))
    for _ in range(2):
        client.submit(list(range(200)), max_tokens=5)
        client.run()
    engine = ScriptedEngine(*scripts)
    engine.numbers = client.loop.counters()
    return engine


def samples(text: str) -> dict[str, float]:
    """By name, with a label's value behind a slash."""
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in read_text(text)
        for sample in family.samples
    }


def scrape(url: str) -> dict[str, float]:
    response = httpx.get(f"{url}/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return samples(response.text)


def ask(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=CHAT | fields)


def test_drafts_are_exported_by_drafter_and_position() -> None:
    """The second reply is known from the first: every draft is accepted."""
    with serving(engine_after_a_run(depth=2)) as url:
        found = scrape(url)
    name = "pippin_spec_decode_num"
    accepted = found[f"{name}_accepted_tokens_total/suffix"]
    assert accepted == found[f"{name}_draft_tokens_total/suffix"] > 1
    positions = [found[f"{name}_accepted_tokens_per_pos_total/suffix/{at}"] for at in range(2)]
    assert positions[0] == found[f"{name}_drafts_total/suffix"]
    assert sum(positions) == accepted
    with serving(engine_after_a_run()) as url:
        assert not [key for key in scrape(url) if key.startswith(name)]


def test_the_engines_numbers_are_exported() -> None:
    engine = engine_after_a_run()
    with serving(engine) as url:
        found = scrape(url)
    status, cache = engine.numbers["metrics"], engine.numbers["cache"]
    assert found["pippin_engine_up"] == 1
    assert found["pippin_num_requests_running"] == found["pippin_num_requests_waiting"] == 0
    assert found["pippin_generation_tokens_total"] == 10
    assert found["pippin_prompt_tokens_total"] == 400
    assert found["pippin_prompt_tokens_cached_total"] == status["cached_tokens"] > 0
    assert found["pippin_prefix_cache_hits_total"] == cache["tokens_matched"] > 0
    assert found["pippin_num_preemptions_total"] == 0
    assert found["pippin_device_idle_ratio"] == status["device_idle_share"]
    for component, nbytes in cache["component_bytes"].items():
        assert found[f"pippin_prefix_cache_bytes/{component}"] == nbytes > 0
        assert f"pippin_prefix_cache_evictions_total/{component}" in found


def test_numbers_of_several_engines_have_the_number_of_their_replica() -> None:
    engine = engine_after_a_run()
    alone = set(samples_of(engine))
    numbers = engine.numbers
    engine.numbers = numbers | {"replicas": [numbers, None, numbers]}
    found = samples_of(engine)
    assert found["pippin_generation_tokens_total/0"] == found["pippin_generation_tokens_total/2"]
    assert "pippin_generation_tokens_total/1" not in found
    assert [found[f"pippin_replica_up/{number}"] for number in range(3)] == [1, 0, 1]
    assert found["pippin_engine_up"] == 1
    assert "pippin_prefix_cache_bytes/attention/0" in found
    assert not any("replica" in name for name in alone)
    with serving(engine) as url:
        modern = httpx.get(f"{url}/metrics", headers={"accept": OPENMETRICS}).text
    names = [family.name for family in read_openmetrics(modern)]
    assert len(names) == len(set(names)), "a family is exported once"


def samples_of(engine: ScriptedEngine) -> dict[str, float]:
    with serving(engine) as url:
        return scrape(url)


def test_both_formats_of_prometheus_hold_the_same_families() -> None:
    engine = engine_after_a_run(say("Hi."))
    with serving(engine) as url:
        ask(url)
        plain = httpx.get(f"{url}/metrics").text
        modern = httpx.get(f"{url}/metrics", headers={"accept": OPENMETRICS})
    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in read_openmetrics(modern.text)}
    assert names == {f.name for f in read_text(plain) if not f.name.endswith("_created")}
    assert all(family.documentation for family in read_openmetrics(modern.text))


def test_replies_are_timed_and_counted_by_their_end() -> None:
    engine = engine_after_a_run(say("one two three four five"), fail("full"))
    with serving(engine) as url:
        ask(url)
        ask(url)
        found = scrape(url)
    num_tokens = found["pippin_request_generation_tokens_sum"]
    assert num_tokens >= 5
    assert found["pippin_requests_total/stop"] == found["pippin_requests_total/error"] == 1
    assert found["pippin_request_success_total/stop"] == 1
    assert "pippin_request_success_total/error" not in found
    assert found["pippin_e2e_request_latency_seconds_count"] == 2
    assert found["pippin_request_prompt_tokens_count"] == 2
    assert found["pippin_time_to_first_token_seconds_count"] == 1
    assert found["pippin_inter_token_latency_seconds_count"] == num_tokens - 1
    assert found["pippin_request_queue_time_seconds_sum"] == 0.25  # as the engine said


def test_a_stop_string_is_a_stop_and_a_request_that_times_out_an_abort() -> None:
    engine = engine_after_a_run(say("one two three"), hang(after="one"))
    with serving(engine) as url:
        ask(url, stop=" two")
        assert scrape(url)["pippin_requests_total/stop"] == 1
        assert ask(url, timeout=0.05).status_code == 408
        found = scrape(url)
    assert found["pippin_requests_total/stop"] == found["pippin_requests_total/abort"] == 1
    assert found["pippin_request_success_total/stop"] == 1


def test_a_lost_engine_is_reported_and_its_numbers_are_not() -> None:
    engine = engine_after_a_run()
    with serving(engine) as url:
        assert "pippin_steps_total" in scrape(url)
        engine.reason = "the engine was killed by signal 9"
        found = scrape(url)
    assert found["pippin_engine_up"] == 0
    assert "pippin_steps_total" not in found
    assert "pippin_time_to_first_token_seconds_count" in found


def test_a_server_without_a_prefix_cache_exports_the_rest() -> None:
    engine = engine_after_a_run(cache=False)
    with serving(engine) as url:
        found = scrape(url)
    assert found["pippin_generation_tokens_total"] == 10
    assert not any(name.startswith("pippin_prefix_cache_") for name in found)


def test_a_scrape_during_a_long_step_gets_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_after_a_run()
    with serving(engine) as url:
        scrape(url)

        async def never() -> dict[str, Any]:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        monkeypatch.setattr(engine, "counters", never)
        monkeypatch.setattr(metrics, "PATIENCE_SECONDS", 0.01)
        found = scrape(url)
    assert found["pippin_generation_tokens_total"] == 10
    assert found["pippin_engine_counters_age_seconds"] > 0


def test_finish_reasons_are_exported_before_the_first_request() -> None:
    with serving(engine_after_a_run()) as url:
        found = scrape(url)
    for reason in get_args(FinishReason):
        assert found[f"pippin_requests_total/{reason}"] == 0


def test_usage_counts_what_running_requests_use_and_not_what_can_be_evicted() -> None:
    client = Client(make_loop())
    engine = ScriptedEngine()
    client.submit(list(range(200)), max_tokens=50)
    for _ in range(8):
        client.loop.step()
    with serving(engine) as url:
        engine.numbers = client.loop.counters()
        memory = engine.numbers["memory"]
        busy = scrape(url)["pippin_kv_cache_usage_perc"]
        assert memory["claimed_bytes"] / memory["budget_bytes"] <= busy < 1
        assert busy > 0
        client.run()
        engine.numbers = client.loop.counters()
        found = scrape(url)
    assert found["pippin_prefix_cache_tokens"] > 0
    assert found["pippin_kv_cache_usage_perc"] == 0


NOT_ALONE = re.compile(r"^(Of |And |In them|It |Given up|these)", re.IGNORECASE)


def loop_with_tiers() -> Loop:
    """A prefix cache, all lower tiers, drafts, both ends of hand-overs, and a finished request."""
    host = HostStore(1 << 20, plain_memory, 8_192)
    store = MemoryStore(b"m", 1 << 20)
    backend = FakeBackend(max_depth=4, num_slots=256)
    client = Client(
        make_loop(backend=backend, suffix_depth=4, host=host, store=store, batch_bytes=8_192)
    )
    add_peer_tier(client.loop.scheduler, Wire())
    add_pushes(client.loop.scheduler)
    client.submit(list(range(200)), max_tokens=5)
    client.run()
    return client.loop


@pytest.fixture(scope="module")
def exported() -> dict[str, Metric]:
    loop = loop_with_tiers()
    engine = ScriptedEngine(say("one two three"))
    engine.numbers = loop.counters()
    loop.close()
    with serving(engine) as url:
        body = {"model": "stories", "prompt": "Hi."}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        alone = families(httpx.get(f"{url}/metrics").text)
        engine.numbers |= {"replicas": [engine.numbers]}
        return families(httpx.get(f"{url}/metrics").text) | alone


def test_the_documented_fields_of_status_are_those_it_has() -> None:
    loop = loop_with_tiers()
    status = loop.status()
    loop.close()
    assert status.pop("disk").keys() == status["host"].keys()
    status["peer"] = {k: v for k, v in status["peer"].items() if k not in status["host"]}
    fields = {name for name, value in status.items() if not isinstance(value, dict)}
    for section in status.keys() - fields:
        fields |= {f"{section}.{name}" for name in status[section]}
    assert documented_status_fields() == fields


def test_the_documented_metrics_are_the_exported_ones(exported: dict[str, Metric]) -> None:
    assert documented() == exported.keys()


def test_every_metric_of_the_dashboard_is_exported(exported: dict[str, Metric]) -> None:
    samples = {sample.name for family in exported.values() for sample in family.samples}
    assert names_in_dashboard() <= samples


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_help_line_can_be_read_alone(exported: dict[str, Metric]) -> None:
    texts = [family.documentation for family in exported.values()]
    for text in texts:
        assert re.fullmatch(r"[A-Z1].*\.", text), text
        assert len(text.split()) >= 4, text
        assert not NOT_ALONE.match(text), text
    assert len(set(texts)) == len(texts)


def test_names_end_in_their_unit(exported: dict[str, Metric]) -> None:
    for name, family in exported.items():
        assert name.endswith("_total") == (family.type == "counter"), name
        if "seconds" in family.documentation.lower().split()[:1]:
            assert name.endswith("_seconds"), name
        if family.documentation.startswith("Bytes"):
            assert name.removesuffix("_total").endswith("_bytes"), name
