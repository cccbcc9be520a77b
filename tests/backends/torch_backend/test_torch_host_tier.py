"""The host's memory as a tier of torch: tokens are those of a cold engine; where it is refused."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

sys.path.append(str(Path(__file__).parents[3] / "tools"))

from torch_gpu import host as host_section

from builders import AMPLE_BYTES
from integrity import check_tier
from memory_store import MemoryStore
from near_ties import assert_same
from pippin.backends.base import Backend, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.cache.host_store import HostStore
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import build_loop, tier_batch_bytes
from pippin.errors import ConfigError, LoadError
from pippin.scheduler import traffic
from pippin.types import GRID, Component
from reference import BUNDLED
from serving import (
    TORCH,
    TORCH_MODELS,
    ask_all,
    cache_of,
    check_idle,
    cold,
    make_backend,
    make_client,
    make_prompt,
)
from torch_serving import make_torch_backend

LENS = (100, 129, 330)


def make_host(name: str, max_bytes: int = 256 << 20) -> HostStore:
    backend = make_backend(name, num_slots=1, pool_bytes=AMPLE_BYTES >> 4)
    return HostStore(max_bytes, backend.host_memory, tier_batch_bytes(backend, capacity_bytes=0))


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH_MODELS)
def test_what_comes_back_from_the_host_says_what_it_said_cold(name: str) -> None:
    host = make_host(name)
    client = make_client(name, host=host)
    prompts = [make_prompt(name, n, seed=n) for n in LENS]
    first = ask_all(client, prompts, max_tokens=12)
    cache_of(client).flush()
    again = ask_all(client, prompts, max_tokens=12)
    expected = cold(name, prompts, max_tokens=12)
    assert_same(first, expected)
    assert_same(again, expected)
    assert [(r.cached_tokens, r.host_tokens) for r in again] == [(n, n) for n in LENS]
    cache_of(client).flush()
    turns = [[*p, *r.tokens, *make_prompt(name, 9, 5)] for p, r in zip(prompts, first, strict=True)]
    replies = ask_all(client, turns, max_tokens=4)
    assert_same(replies, cold(name, turns))
    assert all(r.host_tokens == r.cached_tokens >= n for r, n in zip(replies, LENS, strict=True))
    check_idle(client)
    client.loop.close()


@pytest.mark.slow
def test_a_tree_that_is_too_small_gives_up_to_the_host_and_the_host_to_the_disk() -> None:
    name = f"{TORCH}qwen3_5"
    prompts = [make_prompt(name, 150, seed=n) for n in range(12)]
    row_bytes = make_backend(name, num_slots=1, pool_bytes=AMPLE_BYTES >> 4).row_bytes(150)
    host, disk = make_host(name, 10 * row_bytes), MemoryStore(b"test", 1 << 30)
    client = make_client(name, capacity_bytes=4 * row_bytes, host=host, store=disk)
    expected = cold(name, prompts)
    for order in (1, -1):
        replies = [ask_all(client, [prompt], max_tokens=4)[0] for prompt in prompts[::order]]
        assert_same(replies, expected[::order])
        assert host.counters().bytes <= 10 * row_bytes
    assert any(reply.host_tokens for reply in replies)
    assert any(reply.disk_tokens for reply in replies)
    assert host.counters().evicted > 0
    for flow in client.loop.scheduler.traffic.tiers:
        check_tier(flow.tiers)
    check_idle(client)
    client.loop.close()


def discrete(backend: TorchBackend) -> TorchBackend:
    """As if its device had a memory of its own."""
    backend.device = replace(backend.device, unified=False)
    return backend


def engine_of(backend: Backend, host_cache: str, name: str = "torch") -> Sequence[object]:
    config = Config(
        ModelConfig(BUNDLED, backend=name),  # type: ignore[arg-type]
        EngineConfig(max_running=4, memory="1GB", host_cache=host_cache),
    )
    loop = build_loop(config, lambda _: None, backend=backend)
    found = [flow.tier_io.store for flow in loop.scheduler.traffic.tiers]
    loop.close()
    return found


def test_an_engine_has_it_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a device that computes in the host's memory, or cannot pin it, has no such tier."""

    def fail(nbytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    backend = make_torch_backend(BUNDLED, num_slots=4)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"its own memory; .* uses the host's memory: remov"):
            engine_of(backend, "1GB")
    (store,) = engine_of(discrete(backend), "256MB")
    assert isinstance(store, HostStore)
    backend = discrete(make_torch_backend(BUNDLED, num_slots=4))
    monkeypatch.setattr(backend, "host_memory", fail)
    with pytest.raises(
        LoadError, match=r"256\.0 MB of pinned .* \(CUDA.*: use .* --host-cache 128MB"
    ):
        engine_of(backend, "256MB")


@pytest.mark.parametrize(
    ("host_cache", "backend_name", "error", "words"),
    [
        ("1KB", "torch", ConfigError, "host_cache: 1,000 bytes hold no entry"),
        (
            "900TB",
            "torch",
            ConfigError,
            r"host_cache is 900\.0 TB, and this machine has .*: use --host-cache [\d.]+[GT]B",
        ),
        ("1GB", "mlx", ConfigError, "pinned memory, which mlx does not have: use --backend torch"),
    ],
)
def test_what_cannot_be_had_is_refused(
    host_cache: str, backend_name: str, error: type[Exception], words: str
) -> None:
    backend = discrete(make_torch_backend(BUNDLED, num_slots=4))
    with pytest.raises(error, match=words):
        engine_of(backend, host_cache, backend_name)


@pytest.mark.parametrize("name", ["qwen3_5", "llama_windows", "qwen3"])
def test_what_moves_to_and_from_the_host_is_warmed_up_at_load(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of every size in which memory is pinned, and prompts that are restored."""
    monkeypatch.setattr(traffic, "LEAST_BYTES", 1 << 14)
    backend = discrete(make_torch_backend(name, num_slots=4))
    loop = host_section.make_loop(backend, "1GB", "256MB")
    plans: list[StepPlan] = []
    launch = backend.launch
    monkeypatch.setattr(backend, "launch", lambda plan: (plans.append(plan), launch(plan))[1])
    assert not loop.warm_up.done
    loop.warm_up.run_at_load(lambda _: None)
    assert loop.warm_up.done
    loads = [load for plan in plans for load in plan.load]
    spills = [spill for plan in plans for spill in plan.spill]
    assert len(loads) == len(spills)
    assert {load.component for load in loads} == set(backend.spec.components)
    lengths = [load.num_tokens for load in loads if load.component is Component.ATTENTION]
    batch_bytes = loop.scheduler.traffic.tiers[0].tiers.batch_bytes
    most = min(batch_bytes // backend.spec.kv_bytes_per_token, backend.spec.max_len - GRID - 2)
    assert most - GRID < lengths[0] == lengths[1] <= most
    assert lengths[2:] == [lengths[0] >> n for n in range(1, len(lengths) - 1)]
    assert len(lengths) > 3
    rows = [row for plan in plans for row in plan.prefill]
    assert [(row.start, len(row.tokens)) for row in rows] == [(lengths[0], 0), (lengths[0], GRID)]
    assert backend.runner.pools.arena.used_bytes == 0
    loop.close()


def test_a_copy_that_fails_while_warming_up_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = discrete(make_torch_backend("qwen3_5", num_slots=4))
    loop = host_section.make_loop(backend, "1GB", "256MB")
    launch = backend.launch

    def fails(plan: StepPlan) -> object:
        if plan.prefill:
            raise RuntimeError("out of kernels")
        return launch(plan)

    monkeypatch.setattr(backend, "launch", fails)
    loop.warm_up.run_at_load(lambda _: None)
    assert "no more warming up: out of kernels" in caplog.text
    assert backend.runner.pools.arena.used_bytes == 0
    loop.close()


@pytest.mark.slow
def test_the_section_of_the_check_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    loop = host_section.make_loop(
        discrete(make_torch_backend("qwen3_5", num_slots=16)), "1GB", "256MB"
    )
    loop.scheduler.pace.compute_seconds = lambda tokens: 1.0 * tokens
    (flow,) = loop.scheduler.traffic.tiers
    ticks = count()
    loop.scheduler.traffic.clock = lambda: 0.01 * next(ticks)
    # More slowly than prompts are computed, as it is on a GPU: spills wait while nothing runs.
    flow.tiers.kind = replace(flow.tiers.kind, max_bytes_written=1e5)

    def measure(loop: object) -> None:
        host_section.come_back(loop, (200,), "bundled", exact=True)
        host_section.gaps(loop, 200, num_streams=2, num_tokens=30, num_prompts=2)

    with torch.inference_mode():
        host_section.run(loop, measure)
    said = capsys.readouterr().out
    assert "of 4 replies 4 as cold, 4 as from the tree" in said
    assert "2 streams, prompts from the host: gaps p50" in said
    assert "2 prompts of 200, first token after" in said
