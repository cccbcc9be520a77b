"""What each of several engines is started with."""

from __future__ import annotations

from typing import Any

import pytest

from cases import cases
from pippin.backends.host import THREAD_LIMITS, num_threads
from pippin.config import Config, EngineConfig, PeersConfig, ServerConfig
from pippin.engine.build_loop import _remedy, budget_bytes
from pippin.errors import ConfigError
from pippin.startup.engines import CUDA_DEVICES, plan_replicas
from pippin.startup.launch import check_devices

GB = 10**9


def planned(server: dict[str, Any], **engine: Any) -> Config:
    return Config(server=ServerConfig(**server), engine=EngineConfig(**engine))


def test_one_engine_has_all() -> None:
    config = planned({})
    (plan,) = plan_replicas(config)
    assert plan.config is config
    assert plan.environment == {}


@pytest.mark.parametrize(
    ("memory", "nbytes"),
    [("auto", 30 * GB), ("0.5", 25 * GB), ("40GB", 20 * GB), ("auto/2", 15 * GB)],
)
def test_replicas_on_one_device_divide_what_there_is(memory: str, nbytes: int) -> None:
    config = planned(
        {"replicas": 2}, memory=memory, host_cache="10GB", cache_dir="/cache", disk="7GB"
    )
    plans = plan_replicas(config)
    engines = [plan.config.engine for plan in plans]
    assert [engine.cache_dir for engine in engines] == ["/cache/replica-0", "/cache/replica-1"]
    assert {(engine.host_cache, engine.disk) for engine in engines} == {
        (str(5 * GB), str(7 * GB // 2))
    }
    assert {budget_bytes(engine, 100 * GB, 0.6) for engine in engines} == {nbytes}
    threads = str(max(num_threads() // 2, 1))
    assert plans[0].environment == dict.fromkeys(THREAD_LIMITS, threads)


def test_replicas_on_a_device_each_have_its_whole_memory() -> None:
    plans = plan_replicas(planned({"devices": "0, GPU-8932f937,0"}, memory="auto"))
    assert [plan.environment[CUDA_DEVICES] for plan in plans] == ["0", "GPU-8932f937", "0"]
    memories = [budget_bytes(plan.config.engine, 100 * GB, 0.6) for plan in plans]
    assert memories == [30 * GB, 60 * GB, 30 * GB]


def test_a_single_device_is_no_replica() -> None:
    (plan,) = plan_replicas(planned({"devices": "3"}))
    assert plan.environment == {CUDA_DEVICES: "3"}
    assert plan.config.engine.memory == "auto"


def test_ports_of_events_follow_each_other() -> None:
    addresses = {"kv_events": "tcp://[::1]:5557", "kv_events_replay": "tcp://*:5657"}
    servers = [plan.config.server for plan in plan_replicas(planned({"replicas": 3, **addresses}))]
    assert [server.kv_events for server in servers] == [f"tcp://[::1]:{5557 + n}" for n in range(3)]
    assert [server.kv_events_replay for server in servers] == [
        f"tcp://*:{5657 + n}" for n in range(3)
    ]


@pytest.mark.parametrize(
    ("kv_events", "replay"), [("tcp://*:5557", "tcp://*:5558"), ("tcp://*:65535", None)]
)
def test_ports_that_would_meet_are_refused(kv_events: str, replay: str | None) -> None:
    with pytest.raises(ConfigError, match="kv_events takes 2 ports"):
        plan_replicas(planned({"replicas": 2, "kv_events": kv_events, "kv_events_replay": replay}))


def test_an_engine_of_a_pair_has_no_replicas() -> None:
    peers = PeersConfig(role="prefill", peer_listen="tcp://127.0.0.1:5555")
    with pytest.raises(ConfigError, match="role is prefill, and there are 2 replicas"):
        plan_replicas(Config(server=ServerConfig(replicas=2), peers=peers))


@cases(
    ("options", "said"),
    [
        ({"replicas": 0}, "replicas must be at least 1"),
        ({"replicas": 65}, "replicas must be at most 64"),
        ({"devices": ""}, "devices is ''"),
        ({"devices": "0,,1"}, "use numbers or UUIDs"),
        ({"devices": "0;rm"}, "use numbers or UUIDs"),
        ({"devices": "0,1", "replicas": 3}, "replicas is 3 and devices names 2"),
        ({"replicas": 2, "step_log": "s"}, "step_log records one engine, and there are 2"),
        ({"devices": "0,1", "step_log": "s"}, "remove --step-log"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ServerConfig(**options)


@pytest.mark.parametrize("memory", ["auto/0", "auto/x", "6GB/", "6GB/2/2", "/2", "auto/1001"])
def test_memory_is_divided_by_a_number(memory: str) -> None:
    with pytest.raises(ConfigError, match="memory"):
        EngineConfig(memory=memory)


def test_replicas_that_do_not_fit_are_told_how_much_all_need() -> None:
    said = _remedy(3 * GB, 8 * GB, 4)
    assert "4 engines share the device, which has 8.0 GB, and each needs 3.0 GB" in said
    assert "--memory 12GB or more" in said
    assert "use at most 2 (--replicas)" in said


@pytest.mark.parametrize(
    ("devices", "found", "named"),
    [
        ("0,1", [], "no NVIDIA GPU that its driver shows: remove --devices; --replicas 2 starts"),
        ("0", [], "without it the engine uses the device that there is"),
        ("0,1", ["GPU-ab12"], r"devices names GPU 1, and this machine has 1: use 0.*GPU-ab12"),
        ("2", ["GPU-ab12", "GPU-cd34"], "names GPU 2, and this machine has 2: use 0 to 1"),
        ("GPU-cd", ["GPU-ab12"], "names GPU GPU-cd, and this machine has 1"),
    ],
)
def test_devices_that_are_not_there_are_refused(
    devices: str, found: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin.startup.launch.gpu_ids", lambda: found)
    with pytest.raises(ConfigError, match=named):
        check_devices(ServerConfig(devices=devices))


@pytest.mark.parametrize(
    ("devices", "found"),
    [(None, []), ("0,1", None), ("1,0", ["GPU-ab12", "GPU-cd34"]), ("GPU-ab,MIG-7", ["GPU-ab12"])],
)
def test_devices_that_exist_or_that_cannot_be_looked_up_are_accepted(
    devices: str | None, found: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin.startup.launch.gpu_ids", lambda: found)
    check_devices(ServerConfig(devices=devices))


def test_a_device_is_shared_by_those_that_name_it() -> None:
    assert ServerConfig(replicas=3).replicas_per_device == 3
    assert ServerConfig(devices="0,1").replicas_per_device == 1
    assert ServerConfig(devices="0,1,0").replicas_per_device == 2
