"""What replicas of a model and several models get of options and memory, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bundled import BUNDLED_PATH
from cases import cases
from pippin.amounts import budget_of, option_bytes, parse_memory
from pippin.backends.fake import FakeBackend
from pippin.backends.host import THREAD_LIMITS, num_threads
from pippin.config import Config, EngineConfig, ModelConfig, PeersConfig, ServerConfig
from pippin.engine.build_loop import _remedy, build_loop, load_backend
from pippin.errors import ConfigError, LoadError
from pippin.startup.engines import (
    CUDA_DEVICES,
    OnDemandModels,
    check_fit,
    divide,
    least_bytes,
    plan_replicas,
    with_remedy,
)
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
    assert {budget_of(engine.memory, 100 * GB, 0.6) for engine in engines} == {nbytes}
    threads = str(max(num_threads() // 2, 1))
    assert plans[0].environment == dict.fromkeys(THREAD_LIMITS, threads)


def test_replicas_on_a_device_each_have_its_whole_memory() -> None:
    plans = plan_replicas(planned({"devices": "0, GPU-8932f937,0"}, memory="auto"))
    assert [plan.environment[CUDA_DEVICES] for plan in plans] == ["0", "GPU-8932f937", "0"]
    memories = [budget_of(plan.config.engine.memory, 100 * GB, 0.6) for plan in plans]
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


def ignore(stage: str) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mlx", "torch"])
@pytest.mark.parametrize("budget", ["1MB", "30MB"])
def test_a_budget_that_is_too_small_names_one_that_is_not(backend: str, budget: str) -> None:
    model = ModelConfig(str(BUNDLED_PATH), backend=backend, dtype="float32")  # type: ignore[arg-type]
    config = Config(model, EngineConfig(max_running=2, memory=budget))
    loaded = load_backend(config, ignore)
    with pytest.raises(LoadError, match=r"memory: the model uses .* of a budget of") as refused:
        build_loop(config, ignore, backend=loaded)
    found = re.search(r"start with --memory ([\d.]+[GM]B) or more", refused.value.message)
    assert found is not None, refused.value.message
    enough = replace(config, engine=replace(config.engine, memory=found[1]))
    build_loop(enough, ignore, backend=loaded).close()


@pytest.mark.slow
def test_a_model_that_the_device_is_too_small_for_names_no_budget() -> None:
    model = ModelConfig(str(BUNDLED_PATH), backend="mlx", dtype="float32")
    config = Config(model, EngineConfig(memory="1MB"))
    loaded = load_backend(config, ignore)
    loaded.device = replace(loaded.device, memory_bytes=10**6)  # type: ignore[misc]
    with pytest.raises(
        LoadError, match=r"the device has 1\.0 MB: use a smaller or quantized model"
    ):
        build_loop(config, ignore, backend=loaded)


def test_a_backend_that_has_no_room_is_closed_unless_it_is_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has claimed of the device would be missing at the next try in this process."""
    closed: list[FakeBackend] = []
    monkeypatch.setattr(FakeBackend, "limit_memory", lambda self, budget: 0)
    monkeypatch.setattr(FakeBackend, "close", lambda self: closed.append(self))
    config = Config(ModelConfig(backend="fake"))
    with pytest.raises(LoadError, match="memory"):
        build_loop(config, ignore)
    assert len(closed) == 1
    with pytest.raises(LoadError, match="memory"):
        build_loop(config, ignore, backend=FakeBackend())
    assert len(closed) == 1


@cases("nbytes", [1, 999, 10**5, 10**6 + 1, 999_999_999, 6_250_000_001, 10**14])
def test_an_amount_to_give_is_never_rounded_down(nbytes: int) -> None:
    assert nbytes <= parse_memory(option_bytes(nbytes)) <= 1.1 * nbytes + 1000


@pytest.mark.parametrize(
    "reason",
    [
        "the engine process was killed by SIGKILL",
        "could not load m: std::bad_alloc",
        "could not load m: [metal::malloc] Attempting to allocate 99 bytes",
        "could not load m: Unable to allocate 3. GiB for an array",
    ],
)
def test_an_engine_that_ran_out_of_memory_is_explained(tmp_path: Path, reason: str) -> None:
    with (tmp_path / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(2_500_000_000)  # sparse
    explained = with_remedy(reason, Config(ModelConfig(str(tmp_path))))
    assert explained.startswith(reason)
    assert "The weights are 2.5 GB on disk, and this machine has" in explained
    assert "use a smaller or quantized model, or lower --max-model-len" in explained


@pytest.mark.parametrize(
    "reason", ["memory: the model uses 5.0 GB of a budget of 4.0 GB", "could not load m: no layers"]
)
def test_other_reasons_stay_as_they_are(reason: str) -> None:
    assert with_remedy(reason, Config()) == reason


def test_models_that_all_fit_share_what_is_left() -> None:
    assert divide(60, [40, 5, 5]) == [43, 8, 8]


def test_in_memory_for_one_the_largest_gets_all_of_it() -> None:
    assert divide(10, [8, 8, 8]) == [10, 10, 10]
    assert divide(10, [8, 6]) == [10, 8]


@cases("seed", range(20))
def test_any_models_that_fit_by_their_least_fit_by_their_claims(seed: int) -> None:
    chance = random.Random(seed)
    leasts = [chance.randint(1, 100) for _ in range(chance.randint(1, 6))]
    budget = chance.randint(max(leasts), 2 * sum(leasts))
    claims = divide(budget, leasts)
    together = max(k for k in range(1, len(leasts) + 1) if sum(sorted(leasts)[-k:]) <= budget)
    assert all(sum(some) <= budget for some in itertools.combinations(claims, together))
    assert all(claim >= least for claim, least in zip(claims, leasts, strict=True))


def test_a_model_that_does_not_fit_alone_is_refused_with_the_amount_that_it_needs() -> None:
    config = Config(
        ModelConfig(model=str(BUNDLED_PATH)), server=ServerConfig(served_name="stories")
    )
    least = least_bytes(config)
    weights = sum(file.stat().st_size for file in BUNDLED_PATH.glob("model*.safetensors"))
    assert weights < least < 10 * weights + 100_000_000
    with pytest.raises(LoadError, match=r"stories needs about .* MB, .*use --memory \d+"):
        check_fit(least - 1, config, least)
    check_fit(least, config, least)


def test_a_model_needs_memory_for_each_of_its_replicas_on_a_device() -> None:
    one = Config(ModelConfig(model=str(BUNDLED_PATH)), server=ServerConfig(served_name="stories"))
    two = replace(one, server=replace(one.server, replicas=2))
    memory = EngineConfig(memory=str(2 * least_bytes(one) - 1))

    async def start(config: Config) -> None:
        OnDemandModels([config], replace(config, engine=memory))

    asyncio.run(start(one))
    with pytest.raises(LoadError, match=r"needs about .* for 2 replicas, and the budget"):
        asyncio.run(start(two))


def test_float32_takes_twice_the_bytes_of_sixteen_bits() -> None:
    half = Config(ModelConfig(model=str(BUNDLED_PATH), dtype="float16"))
    full = replace(half, model=replace(half.model, dtype="float32"))
    assert least_bytes(full) > 1.5 * least_bytes(half) - 64_000_000
