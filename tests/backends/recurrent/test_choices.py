"""Which recurrence a model gets: by times where there is something to time, else ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from bundled import BUNDLED_PATH
from families import build
from pippin.backends.mlx import load, substitutions, timing
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.operations.bindings import without_operations
from pippin.backends.mlx.recurrent import choices
from pippin.backends.mlx.recurrent.calls import Call, Kind, Phase, is_among
from pippin.backends.mlx.recurrent.choices import (
    CHAIN,
    Choice,
    Times,
    choose_recurrences,
    obstacle_to_mlx_lm,
    work,
)
from pippin.backends.mlx.recurrent.slices import run_in_slices
from pippin.backends.mlx.recurrent.taps import LayerStates, tap_block_states

PREFILL: Phase = "prefill"
DECODE: Phase = "decode"


def gated_delta_call(
    num_tokens: int = 1, key_dim: int = 16, dtype: mx.Dtype = mx.float32, **more: Any
) -> Call:
    def per_token(*shape: int) -> mx.array:
        return mx.zeros((1, num_tokens, *shape), dtype)

    args = (per_token(2, key_dim), per_token(2, key_dim), per_token(4, 16), per_token(4))
    return Call.of("gated_delta_update", (*args, per_token(4), mx.zeros(4), mx.zeros(4)), more)


def ssm_call(num_tokens: int = 1, state_dim: int = 16, **more: Any) -> Call:
    heads, groups = mx.zeros((1, num_tokens, 4, 8)), mx.zeros((1, num_tokens, 2, state_dim))
    steps = mx.zeros((1, num_tokens, 4))
    args = (heads, mx.zeros(4), groups, groups, mx.zeros(4), steps, mx.zeros(4))
    return Call.of("ssm_update", args, more)


def nothing_is_timed(_: Callable[[], None]) -> float:
    raise AssertionError("timed")


def no_obstacle(_call: Call, _phase: Phase) -> None:
    return None


def test_off_metal_it_is_ours_and_nothing_is_timed_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "on_metal", lambda: False)
    path = tmp_path / "times.json"
    chosen = choose_recurrences(
        [gated_delta_call(), ssm_call()],
        deterministic=False,
        path=path,
        seconds_of=nothing_is_timed,
    )
    assert [str(choice) for choice in chosen] == [
        *["ours: mlx-lm has only a Python loop here"] * 2,
        *["ours: mlx-lm has no kernel here"] * 2,
    ]
    assert not path.exists()


def test_on_metal_only_shapes_that_mlx_lm_s_kernels_take_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "on_metal", lambda: True)

    def obstacles(call: Call) -> list[str | None]:
        return [obstacle_to_mlx_lm(call, phase) for phase in (PREFILL, DECODE)]

    assert obstacles(gated_delta_call(key_dim=64)) == [None, None]
    assert obstacles(ssm_call(state_dim=128)) == ["mlx-lm has no kernel for many tokens", None]
    assert (
        obstacles(gated_delta_call(key_dim=48))
        == ["mlx-lm has only a Python loop for keys of 48"] * 2
    )
    assert None not in obstacles(gated_delta_call(key_dim=64, use_kernel=False))
    assert None not in obstacles(ssm_call(state_dim=16))


@pytest.mark.parametrize("call", [gated_delta_call(), ssm_call()], ids=lambda call: call.function)
def test_both_are_timed_once_and_remembered_until_the_file_goes(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "sizes", lambda phase: [(2, 70 if phase == PREFILL else 1)])
    monkeypatch.setattr(timing, "REPEATS", 1)
    path = tmp_path / "times.json"
    choose = partial(
        choose_recurrences, [call], deterministic=False, path=path, obstacle=no_obstacle
    )
    first = choose()
    assert [choice.kind.phase for choice in first] == [PREFILL, DECODE]
    for choice in first:
        assert choice.times is not None
        assert choice.times.ours_ms > 0
        assert choice.times.mlx_lm_ms > 0
    assert choose(seconds_of=nothing_is_timed) == first
    path.unlink()
    with pytest.raises(AssertionError, match="timed"):
        choose(seconds_of=nothing_is_timed)


def test_times_of_another_shape_or_type_or_library_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "times.json"
    num_timed = 0

    def timer(_: Callable[[], None]) -> float:
        nonlocal num_timed
        num_timed += 1
        return 1e-3

    def choose(call: Call) -> int:
        before = num_timed
        choose_recurrences(
            [call], deterministic=False, path=path, obstacle=no_obstacle, seconds_of=timer
        )
        return num_timed - before

    monkeypatch.setattr(choices, "sizes", lambda _: [(1, 2)])
    assert choose(gated_delta_call()) == 4  # two phases, two functions
    assert choose(gated_delta_call(num_tokens=3)) == 0
    assert choose(gated_delta_call(key_dim=32)) == 4
    assert choose(gated_delta_call(dtype=mx.bfloat16)) == 4
    monkeypatch.setattr(timing.importlib.metadata, "version", lambda _: "99")
    assert choose(gated_delta_call()) == 4


def test_the_times_go_to_the_function_that_took_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def work_of(function: Callable[..., Any], *_: Any) -> Callable[[], Any]:
        return lambda: function

    monkeypatch.setattr(choices, "work", work_of)
    monkeypatch.setattr(choices, "sizes", lambda _: [(1, 1), (8, 1)])
    seconds = {choices.OURS["ssm_update"]: 0.016, choices.MLX_LM["ssm_update"]: 0.032}
    times = choices.time_both(ssm_call(), DECODE, lambda run: seconds[run()])
    assert times == Times(ours_ms=2 * 16 / CHAIN[DECODE], mlx_lm_ms=2 * 32 / CHAIN[DECODE])


def test_a_kernel_that_fails_leaves_the_choice_to_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**_: Any) -> None:
        raise RuntimeError("no such kernel")

    path = tmp_path / "times.json"
    monkeypatch.setattr(choices, "sizes", lambda _: [(1, 1)])
    monkeypatch.setitem(choices.MLX_LM, "ssm_update", broken)
    choose = partial(choose_recurrences, deterministic=False, path=path, obstacle=no_obstacle)
    chosen = choose([ssm_call()], seconds_of=lambda _: 1e-3)
    assert [str(choice) for choice in chosen] == ["ours: mlx-lm's failed here: no such kernel"] * 2
    assert "no such kernel" in caplog.text
    assert not path.exists()
    monkeypatch.setitem(choices.OURS, "ssm_update", broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        choose([ssm_call()], seconds_of=lambda _: 1e-3)


@pytest.mark.parametrize(
    ("phase", "mlx_lm_ms", "chosen"),
    [(PREFILL, 0.9, True), (PREFILL, 0.99, False), (DECODE, 0.9, True), (DECODE, 0.99, False)],
)
def test_mlx_lm_s_must_be_faster(phase: Phase, mlx_lm_ms: float, chosen: bool) -> None:
    choice = Choice(Kind("ssm_update", phase, "x"), Times(1.0, mlx_lm_ms))
    assert choice.mlx_lm is chosen
    assert str(choice).startswith("mlx-lm's: 1.00 ms ours" if chosen else "ours: 1.00 ms ours")


def test_deterministic_mode_does_not_go_by_times(tmp_path: Path) -> None:
    chosen = choose_recurrences(
        [gated_delta_call()],
        deterministic=True,
        path=tmp_path / "times.json",
        obstacle=no_obstacle,
        seconds_of=nothing_is_timed,
    )
    assert not any(choice.mlx_lm for choice in chosen)


def test_what_is_timed_hands_the_state_on() -> None:
    states: list[mx.array | None] = []

    def function(*, q: mx.array, state: mx.array | None = None, **_: Any) -> Any:
        states.append(state)
        return q, mx.array(len(states))

    work(function, gated_delta_call(), PREFILL, 2, 5)()
    assert [None if s is None else s.item() for s in states] == [
        None,
        *range(1, CHAIN[PREFILL] + 1),
    ]


def test_rows_and_tokens_are_no_part_of_a_kind_but_shapes_and_types_are() -> None:
    kind = gated_delta_call().kind()
    assert str(kind) == "gated_delta_update decode: q 2x16, k 2x16, v 4x16, a 4, b 4, float32"
    assert gated_delta_call().resized(3, 7).kind(DECODE) == kind
    assert gated_delta_call(num_tokens=9).kind().phase == PREFILL
    assert gated_delta_call(dtype=mx.float16).kind() != kind


def test_ragged_mamba_rows_are_never_mlx_lm_s() -> None:
    kinds = frozenset({ssm_call().kind(), gated_delta_call().kind()})

    def among(call: Call) -> bool:
        return is_among(kinds, call)

    assert among(ssm_call())
    assert not among(ssm_call(mask=mx.ones((1, 1))))
    assert not among(ssm_call(lengths=mx.ones(1)))
    assert not among(ssm_call(num_tokens=2))
    assert among(gated_delta_call(mask=mx.ones((1, 1))))


def prepare(
    family: str, times: Mapping[Phase, Times], path: Path, monkeypatch: pytest.MonkeyPatch
) -> load.LoadedModel:
    monkeypatch.setattr(choices, "time_both", lambda call, phase, timer: times[phase])
    forced = partial(choose_recurrences, path=path, obstacle=no_obstacle)
    monkeypatch.setattr(load, "choose_recurrences", forced)
    return load.prepare(*build(family))


def states_recorded(loaded: load.LoadedModel, tokens: mx.array) -> LayerStates:
    with tap_block_states() as layers:
        loaded.forward(tokens, make_prompt_cache(loaded.model))
    return layers


@pytest.fixture
def no_operations() -> Iterator[None]:
    """As on a GPU, where a layer calls its recurrence and there is something to choose."""
    with without_operations():
        yield


@pytest.mark.usefixtures("no_operations")
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "nemotron_h"])
def test_a_model_runs_what_was_chosen_for_each_phase(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And records its states at every 64 tokens, whichever it is."""
    theirs: list[str] = []

    def note(function: Callable[..., Any], call: Call) -> Any:
        theirs.append(call.function)
        return run_in_slices(function, call)

    monkeypatch.setattr(substitutions, "run_in_slices", note)
    faster, slower = Times(2.0, 1.0), Times(1.0, 2.0)
    tokens = mx.array(np.random.default_rng(0).integers(0, 256, (1, 150)), dtype=mx.int32)
    model, _ = build(family)
    logits = model(tokens, cache=make_prompt_cache(model))
    recorded = []
    for prefill, decode in [(faster, slower), (slower, faster)]:
        path = tmp_path / f"{prefill.ours_ms}.json"
        loaded = prepare(family, {PREFILL: prefill, DECODE: decode}, path, monkeypatch)
        assert loaded.state_taps
        for phase, num_tokens in ((prefill, 150), (decode, 1)):
            theirs.clear()
            layers = states_recorded(loaded, tokens[:, :num_tokens])
            assert bool(theirs) is (phase is faster)
            assert {len(states) for states in layers} == {3 if num_tokens == 150 else 1}
            recorded.append(layers)
        ours = loaded.forward(tokens, make_prompt_cache(loaded.model))
        assert mx.abs(ours - logits).max().item() < 1e-3
    for a, b in zip(recorded[:2], recorded[2:], strict=True):
        for one, other in zip(a, b, strict=True):
            for n in range(len(one)):
                assert mx.abs(one[n] - other[n]).max().item() < 1e-4


def test_a_model_s_own_calls_are_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "on_metal", lambda: False)
    gated, mamba = (load.prepare(*build(family)) for family in ("qwen3_5", "nemotron_h"))
    assert {str(choice.kind) for choice in gated.recurrences} == {
        f"gated_delta_update {phase}: q 2x16, k 2x16, v 4x16, a 4, b 4, float32"
        for phase in (PREFILL, DECODE)
    }
    assert {str(choice.kind) for choice in mamba.recurrences} == {
        f"ssm_update {phase}: hidden_states 8x16, B 2x16, C 2x16, dt 8, float32"
        for phase in (PREFILL, DECODE)
    }
    assert load.prepare(*build("qwen3")).recurrences == ()


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_backend_tells_the_load_that_it_is_deterministic(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def note(calls: Any, *, deterministic: bool, safe: bool) -> tuple[Choice, ...]:
        told.append(deterministic)
        return ()

    monkeypatch.setattr(load, "choose_recurrences", note)
    MLXBackend.load(BUNDLED_PATH, num_slots=1, deterministic=deterministic).close()
    assert told == [deterministic]
