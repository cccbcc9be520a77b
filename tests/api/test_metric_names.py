"""The documents, the dashboard and a server agree on metrics and fields."""

from __future__ import annotations

import re

import httpx
import pytest
from prometheus_client import Metric
from scripted_engine import ScriptedEngine, say, serving

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
from pippin.backends.fake import FakeBackend
from pippin.cache.host_store import HostStore
from pippin.cache.tiers.tier_io import plain_memory
from pippin.scheduler.loop import Loop

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
