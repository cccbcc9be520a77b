"""The ways of attending are timed once per device and shape, and nothing of it can stop a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import mlx.core as mx
import pytest

from families import build
from pippin.backends.mlx import load, trial_run
from pippin.backends.mlx.attention import plain_attention
from pippin.backends.mlx.attention.paths import (
    AttentionPaths,
    PackedCall,
    Path,
    Size,
    kind_of,
)
from pippin.backends.mlx.attention.plain_attention import attend_joined
from pippin.backends.mlx.describe import attention_paths
from pippin.backends.mlx.gpu import attention_times
from pippin.backends.mlx.gpu.attention_times import AttentionLayer, TimedStep, choose_attention

KERNEL, JOINED = Path
SIDE = mx.zeros((2, 1, 16))
LAYER = AttentionLayer(
    kind_of(mx.zeros((1, 4, 1, 16)), (SIDE, SIDE), None),
    *(4, ((2, 16), (2, 16)), mx.float32, 0.25, None),
)
SMALL = (Size(1, 32), Size(4, 16))


def kernel(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    return attend_joined(call)


class Clock:
    """Says of each way what it is told to, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ms: Mapping[Path, float]) -> None:
        self.num_timed = 0
        self._ms = ms
        self.path = KERNEL
        monkeypatch.setattr(attention_times, "TimedStep", partial(NoStep, self))
        monkeypatch.setattr(attention_times, "_check", lambda *_: None)
        monkeypatch.setattr(attention_times, "SIZES", SMALL)

    def __call__(self, run: Callable[[], None]) -> float:
        run()
        self.num_timed += 1
        layers = attention_times.LAYERS * attention_times.CALLS
        return self._ms[self.path] * layers / 1e3


class NoStep:
    def __init__(self, clock: Clock, layer: AttentionLayer, size: Size, path: Path, _: Any) -> None:
        self._clock, self._path = clock, path

    def run(self) -> None:
        self._clock.path = self._path


def choose(
    path: FilePath, clock: Clock, attend: Any = kernel, call: AttentionLayer = LAYER
) -> AttentionPaths:
    return choose_attention({call.kind: call}, attend, path=path, seconds_of=clock)


def test_every_way_is_timed_once_and_remembered(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, {KERNEL: 1.0, JOINED: 2.0})
    path = tmp_path / "attention.json"
    first = choose(path, clock)
    assert clock.num_timed == 2 * len(SMALL)
    assert first.kernel is kernel
    found = first.times[LAYER.kind]
    assert tuple(found) == SMALL
    assert all(ways == {KERNEL: 1.0, JOINED: 2.0} for ways in found.values())
    assert choose(path, clock).times == first.times
    assert clock.num_timed == 2 * len(SMALL)
    path.unlink()
    choose(path, clock)
    assert clock.num_timed == 4 * len(SMALL)


def test_a_kernel_that_rounds_less_than_plain_operations_is_right(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few bits of sharp scores are off by more than any kernel; and layer after layer by more."""

    def exact(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
        out, *tail = attend_joined(plain_attention._in_float32(call))
        return out.astype(call.q.dtype), *(side.astype(call.q.dtype) for side in tail)

    monkeypatch.setattr(attention_times, "SIZES", (Size(1, 512),))
    side = mx.zeros((2, 1, 256))
    kind = kind_of(mx.zeros((1, 8, 1, 256), mx.bfloat16), (side, side), None)
    layer = AttentionLayer(kind, 8, ((2, 256), (2, 256)), mx.bfloat16, 1.0, None)
    chosen = choose_attention(
        {kind: layer}, exact, path=tmp_path / "attention.json", seconds_of=lambda run: 1.0
    )
    assert chosen.kernel is exact


def test_what_there_is_no_time_for_waits_for_the_next_load(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, {KERNEL: 1.0, JOINED: 2.0})
    path = tmp_path / "attention.json"
    seconds = iter([0.0, 0.0, 99.0])
    monkeypatch.setattr(attention_times, "perf_counter", lambda: next(seconds))
    assert list(choose(path, clock).times[LAYER.kind]) == [SMALL[0]]
    monkeypatch.setattr(attention_times, "perf_counter", lambda: 0.0)
    assert list(choose(path, clock).times[LAYER.kind]) == list(SMALL)
    assert clock.num_timed == 2 * len(SMALL)


def test_a_device_that_fails_meanwhile_attends_as_if_untimed(
    tmp_path: FilePath, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Callable[[], None]) -> float:
        raise RuntimeError("no such kernel")

    path = tmp_path / "attention.json"
    chosen = choose_attention({LAYER.kind: LAYER}, kernel, path=path, seconds_of=broken)
    assert chosen.kernel is kernel
    assert not chosen.times
    assert "no such kernel" in caplog.text
    assert not path.exists()


def test_a_kernel_that_is_off_for_some_size_is_not_used(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have run at load: rows were short then."""

    def off_for_long_rows(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
        out, *tail = attend_joined(call)
        return (out if call.num_columns < 32 else 0 * out), tail[0], tail[1]

    monkeypatch.setattr(attention_times, "SIZES", SMALL)
    path = tmp_path / "attention.json"
    layers = {LAYER.kind: LAYER}
    chosen = choose_attention(layers, off_for_long_rows, path=path, seconds_of=lambda _: 1.0)
    assert chosen.kernel is None
    assert "the kernel is off" in caplog.text
    assert not path.exists()
    assert choose_attention(layers, kernel, path=path, seconds_of=lambda _: 1.0).kernel is kernel


def test_what_would_take_too_much_memory_is_not_timed(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, {KERNEL: 1.0, JOINED: 2.0})
    monkeypatch.setattr(attention_times, "MOST_BYTES", 4 * 32 * LAYER.token_bytes)
    chosen = choose(tmp_path / "attention.json", clock)
    assert list(chosen.times[LAYER.kind]) == [SMALL[0]]


@pytest.mark.parametrize("path", list(Path))
@pytest.mark.parametrize("size", SMALL)
def test_what_is_timed_attends_that_way(
    path: Path, size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Path] = []

    def noted(way: Path, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        ran.append(way)
        return function(*args, **more)

    fused = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", partial(noted, JOINED, fused))

    def other_kernel(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
        ran.append(KERNEL)
        return call.q, *call.tail

    TimedStep(LAYER, size, path, other_kernel).run()
    assert set(ran) == {path}


def prepared(monkeypatch: pytest.MonkeyPatch, family: str, *, deterministic: bool) -> Any:
    """As on a GPU whose kernel is plain operations."""
    monkeypatch.setattr(load, "on_cpu", lambda: False)
    monkeypatch.setattr(load, "_merge_linear_layers", lambda *_: None)
    monkeypatch.setattr(trial_run, "kernel_of", lambda _: kernel)
    return load.prepare(*build(family), dtype="float32", deterministic=deterministic)


def test_a_model_is_timed_at_load_and_doctor_says_what_was_found(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clock = Clock(monkeypatch, {KERNEL: 3.0, JOINED: 1.0})
    monkeypatch.setattr(load, "choose_attention", partial(choose_attention, seconds_of=clock))
    loaded = prepared(monkeypatch, "qwen3", deterministic=False)
    assert loaded.attention.kernel is kernel
    lines = list(attention_paths(loaded.attention))
    assert [name for name, _ in lines] == [
        "attention, 1 row of 32",
        "attention, 4 rows of 16",
        "attention times",
    ]
    assert lines[0][1].startswith("joined 1.000 ms, kernel 3.000 ms (")
    assert lines[-1][1].startswith(f"in {tmp_path / 'pippin' / 'attention.json'}")


def test_deterministic_mode_times_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "choose_attention", None)
    loaded = prepared(monkeypatch, "qwen3", deterministic=True)
    assert loaded.attention.kernel is kernel
    assert not loaded.attention.times


def test_a_kernel_that_is_off_is_not_used(
    tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def off(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
        out, *tail = attend_joined(call)
        return out * 1.5, tail[0], tail[1]

    monkeypatch.setattr(trial_run, "kernel_of", lambda _: off)
    loaded = load.prepare(*build("qwen3"))
    found, calls = trial_run.packed_rows(loaded.layout, loaded.forward)
    assert found is None
    assert len(calls) == 1
    assert "the kernel is off" in caplog.text
