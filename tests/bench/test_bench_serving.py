"""The HTTP benchmarks against the toy backend: everything is measured and every child ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import httpx
import pytest

import compare
import scenarios
import servers
import streams
from bundled import BUNDLED_PATH
from cli.commands import served_with
from pippin.bench.client import Load, LoadClient, RequestSizes, Target
from pippin.bench.report import BenchError, number
from pippin.bench.serve import find_target, measure_server
from pippin.config import Config, EngineConfig, ModelConfig
from prefix import prefix
from processes import environment
from prompts import Prompts

pytestmark = pytest.mark.slow

TOY = ("--backend", "fake")
TOY_CONFIG = Config(ModelConfig(backend="fake"))
SIZES = RequestSizes(4, 40, 6)


@pytest.fixture(autouse=True, scope="module")
def _children_import_what_we_do() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        yield


def test_every_scenario_gives_all_its_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(scenarios, "RUNNING_TOKENS", 8000)
    with servers.pippin_server(str(BUNDLED_PATH), TOY) as target:
        client = LoadClient(target)
        asyncio.run(scenarios.warm_up(client, Prompts("warm-up").text))
        for scenario in compare.all_scenarios():
            numbers = asyncio.run(scenario.run(client, Prompts(scenario.name)))
            assert set(numbers) >= {measure.name for measure in scenario.measures}
            lead = numbers[scenario.measures[0].name]  # not a number: all came in one piece
            assert lead > 0 or math.isnan(lead), scenario.name
        status = httpx.get(f"{target.url}/status").json()
        assert status["running"] == 0  # the streams that clients disconnected have ended
    with pytest.raises(httpx.ConnectError):
        httpx.get(target.url)


def test_loads_of_a_running_server() -> None:
    loads = [Load(2), Load(rate=100.0)]
    with servers.pippin_server(str(BUNDLED_PATH), TOY) as toy:
        report = measure_server(toy.url + "/v1/", loads, SIZES)
        with pytest.raises(BenchError, match="404 Not Found"):
            measure_server(toy.url, loads, SIZES, model="another")
    at_once, at_rate = report.data["loads"]
    assert [load["outcome"]["generated_tokens"] for load in (at_once, at_rate)] == [24, 24]
    assert at_once["outcome"]["ttft"]["count"] == 4
    assert [row[:3] for row in report.tables[0].rows] == [
        ("2 clients", "4", number(at_once["tokens_per_second"])),
        ("100/s", "4", number(at_rate["tokens_per_second"])),
    ]


def test_requests_that_a_server_refuses_are_counted_and_the_others_measured() -> None:
    sizes = RequestSizes(24, 40, 300)  # long enough to wait for each other on a slow machine
    narrow = ("--max-running", "1", "--max-queue", "4")
    with servers.pippin_server(str(BUNDLED_PATH), (*TOY, *narrow)) as target:
        report = measure_server(target.url, [Load(16)], sizes)
    outcome = report.data["loads"][0]["outcome"]
    ((message, count),) = outcome["errors"].items()
    assert "503" in message
    assert outcome["ttft"]["count"] == 24 - count > 0
    assert report.tables[0].rows[0][1] == f"{24 - count} of 24"
    assert f"16 clients: {count} x {message}" in report.notes


def test_the_prefix_benchmark_sees_the_cache_work() -> None:
    report = prefix(TOY_CONFIG, only=["repeat", "chat"], rounds=1)
    (again,), turns = report.data["repeat"], report.data["chat"]
    assert again["prompt_tokens"] - again["cached_tokens"] <= 64
    assert len(turns) == scenarios.TURNS - 1
    assert all(turn["cached_tokens"] > 1900 for turn in turns)


def test_a_config_survives_as_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment says otherwise of what is a default here."""
    monkeypatch.setenv("PIPPIN_MAX_RUNNING", "3")
    monkeypatch.setenv("PIPPIN_DETERMINISTIC", "true")
    config = Config(
        ModelConfig(model="m", backend="fake", max_len=100),
        EngineConfig(overlap=False, memory="6GB"),
    )
    assert served_with(monkeypatch, *servers.as_options(config)) == config


def test_nobody_listening_is_one_clear_error() -> None:
    url = f"http://127.0.0.1:{servers.free_port()}"
    with pytest.raises(BenchError, match="names no model"):
        find_target(url, None, None)
    with pytest.raises(BenchError, match=url):
        asyncio.run(LoadClient(Target(url, "m")).complete("hello", 1))


def test_a_server_that_cannot_start_says_why() -> None:
    with (
        pytest.raises(BenchError, match=r"pippin left with status 2:[\s\S]*prot"),
        servers.pippin_server(str(BUNDLED_PATH), ["--prot", "1"]),
    ):
        pass


def test_the_cost_of_a_streamed_token_is_measured_in_both_processes() -> None:
    report = streams.streams(only=["chat", "ollama"], streams=[2], rate=400.0, seconds=0.3)
    costs = report.data["costs"]
    assert [each["dialect"] for each in costs] == ["chat", "ollama"]
    assert all(each["streams"] == 2 and each["bytes_per_token"] > 0 for each in costs)
    assert all(each["server_us"] > 0 and each["engine_us"] > 0 for each in costs)
    with pytest.raises(BenchError, match="replies end in 600 s"):
        streams.streams(only=["chat"], streams=[2], rate=400.0, seconds=600.0)


@pytest.mark.parametrize("how", ["sigterm", "kill"])
def test_conversations_are_found_again_after_a_restart(how: str) -> None:
    # A model whose prompts take far longer to compute than to read.
    report = prefix(Config(), only=[how], rounds=1)
    (found,) = report.data[how]
    assert found["equal"] == 1
    assert found["prompt_tokens"] - found["cached_tokens"] <= 64
    assert found["damaged"] == 0
