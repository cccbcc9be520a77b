"""The byte budget reaches mlx, on devices that are here and on those that are not."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from pippin.backends.mlx import backend as backend_module
from pippin.backends.mlx import device, environment
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.device import limit_memory, on_cpu
from pippin.backends.mlx.payloads.packing import payload_arrays
from pippin.cache.prefix_cache import PrefixCache
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import load_backend
from pippin.errors import LoadError
from serving import cache_of, make_client, make_prompt, served


@pytest.fixture
def limits_restored() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.mark.usefixtures("limits_restored")
@pytest.mark.parametrize("budget", [1 << 28, 3 << 30, 1 << 36])
def test_mlx_is_told_the_budget(budget: int) -> None:
    """Spare buffers are part of it: on GPUs mlx itself sees to that."""
    usable = limit_memory(budget)
    memory, spare = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    assert memory == usable
    assert memory + spare == budget if on_cpu() else memory == budget
    assert 0 < spare <= budget / 4


@pytest.mark.usefixtures("limits_restored")
@pytest.mark.skipif(not on_cpu(), reason="of CPUs")
def test_spare_buffers_are_beside_the_limit_on_cpus() -> None:
    """What `limit_memory` knows of mlx: if this fails, they need not be taken off any more."""
    mx.set_cache_limit(64 << 20)
    mx.set_memory_limit(mx.get_active_memory() + (40 << 20))
    array = mx.zeros(32 << 18)
    mx.eval(array)
    del array
    kept = mx.get_cache_memory()
    other = mx.zeros(36 << 18)
    mx.eval(other)
    assert mx.get_cache_memory() >= kept >= 32 << 20


GIB = 1 << 30
MAC = {
    "device_name": "Apple M4",
    "max_recommended_working_set_size": 24 * GIB,
    "resource_limit": 499_000,
}


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A Metal device that is told things and computes nothing: what it was told."""
    told: dict[str, int] = {}
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(device, "on_metal", lambda: True)
    monkeypatch.setattr(backend_module, "on_cpu", lambda: False)
    monkeypatch.setattr(mx, "device_info", lambda *_: MAC)
    for name in ("set_cache_limit", "set_memory_limit", "set_wired_limit"):
        monkeypatch.setattr(mx, name, lambda value, name=name: told.update({name: value}))
    return told


def test_half_of_what_the_weights_leave_may_be_spare_buffers_on_metal(
    on_a_mac: dict[str, int],
) -> None:
    assert limit_memory(20 * GIB, 8 * GIB) == 20 * GIB
    assert on_a_mac == {"set_cache_limit": 6 * GIB, "set_memory_limit": 20 * GIB}
    limit_memory(4 * GIB, 8 * GIB)  # too little: an error elsewhere, no negative limit here
    assert on_a_mac["set_cache_limit"] == 0


@pytest.mark.parametrize("wired", [False, True])
def test_nothing_but_the_weights_is_wired_and_only_if_asked(
    on_a_mac: dict[str, int], monkeypatch: pytest.MonkeyPatch, wired: bool
) -> None:
    backend = MLXBackend(served("llama"), num_slots=1, wired=wired)
    monkeypatch.setattr(backend, "memory_used", lambda: 5 * GIB)
    backend.limit_memory(20 * GIB)
    assert on_a_mac.get("set_wired_limit") == (5 * GIB if wired else None)


def test_no_more_is_wired_than_metal_recommends(on_a_mac: dict[str, int]) -> None:
    device.wire(30 * GIB)
    assert on_a_mac == {"set_wired_limit": 24 * GIB}


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5", "deepseek_v3"])
@pytest.mark.usefixtures("on_a_mac")
def test_a_tree_of_the_smallest_entries_leaves_half_of_metals_buffers(family: str) -> None:
    """A block of one token, and a state, are the least bytes that a buffer can stand for."""
    backend = MLXBackend(served(family), num_slots=1)
    capacity = backend.limit_memory(20 * GIB)
    spec = backend.spec
    caches = served(family).layout.caches
    shapes = {(cache.component, cache.shapes) for cache in caches if not cache.is_state}
    for component in {component for component, _ in shapes}:
        per_token = sum(cache.nbytes for cache in caches if cache.component is component)
        num_buffers = 2 * sum(1 for kind, _ in shapes if kind is component)
        assert capacity // per_token * num_buffers <= 499_000 / 2
    if spec.state_bytes:
        num_buffers = sum(len(cache.shapes) for cache in caches if cache.is_state)
        assert capacity // spec.state_bytes * num_buffers <= 499_000 / 2


def environment_at_load(monkeypatch: pytest.MonkeyPatch, **engine: Any) -> dict[str, str]:
    """What mlx would read, when the model is loaded."""
    names = (environment.TF32, *environment.BUFFER_LIMITS)
    seen: dict[str, str] = {}

    def load(path: Path, **_: object) -> None:
        seen.update({name: os.environ[name] for name in names if name in os.environ})

    monkeypatch.setattr(MLXBackend, "load", load)
    load_backend(Config(ModelConfig(backend="mlx"), EngineConfig(**engine)), lambda _: None)
    return seen


@pytest.mark.parametrize(
    ("set_by_user", "engine", "expected"),
    [
        ({}, {}, {}),
        ({}, {"deterministic": True}, {"MLX_ENABLE_TF32": "0"}),
        (
            {},
            {"buffer_limit": 200},
            {"MLX_MAX_OPS_PER_BUFFER": "200", "MLX_MAX_MB_PER_BUFFER": "200"},
        ),
        ({"MLX_ENABLE_TF32": "1"}, {"deterministic": True}, {"MLX_ENABLE_TF32": "1"}),
    ],
)
def test_options_set_what_mlx_reads_and_the_user_has_not_set(
    set_by_user: dict[str, str],
    engine: dict[str, Any],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (environment.TF32, *environment.BUFFER_LIMITS):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    assert environment_at_load(monkeypatch, **engine) == expected
    assert environment.products_are_exact() is (expected.get("MLX_ENABLE_TF32") == "0")


def test_cuda_graphs_are_off_unless_the_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.CUDA_GRAPHS, raising=False)
    environment_at_load(monkeypatch)
    assert os.environ[environment.CUDA_GRAPHS] == "0"
    monkeypatch.setenv(environment.CUDA_GRAPHS, "1")
    environment_at_load(monkeypatch)
    assert os.environ[environment.CUDA_GRAPHS] == "1"


def test_memory_that_cannot_be_wired_is_not_said_to_be() -> None:
    if device.on_metal():
        pytest.skip("Metal wires memory")
    with pytest.raises(LoadError, match="only Metal"):
        MLXBackend.load(Path("nowhere"), num_slots=1, wired=True)


@pytest.mark.usefixtures("on_a_mac")
def test_status_says_how_many_buffers_there_may_be() -> None:
    assert MLXBackend(served("llama"), num_slots=1).device.max_buffers == 499_000


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_buffers_are_counted_while_somebody_holds_them(name: str) -> None:
    client = make_client(name)
    status = client.loop.status
    weights = status()["memory"]["device_buffers"]
    assert weights == len(tree_flatten(served(name).model.parameters()))
    client.submit(make_prompt(name, 200, seed=1), max_tokens=3)
    client.run()
    held = status()["memory"]["device_buffers"]
    arrays = {id(array) for array in arrays_of(cache_of(client))}
    assert held == weights + len(arrays) > weights
    client.submit(make_prompt(name, 200, seed=1)[:90], max_tokens=3)  # splits a block
    client.step(2)
    assert status()["memory"]["device_buffers"] > held
    client.run()
    client.loop.flush_cache()
    gc.collect()
    assert status()["memory"]["device_buffers"] == weights


def arrays_of(cache: PrefixCache) -> Iterator[mx.array]:
    """Of every payload in the tree."""
    for node in cache.radix.nodes():
        for payload in filter(None, node.payloads):
            yield from payload_arrays(payload)
