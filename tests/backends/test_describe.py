"""What a load chose, in words; what a backend does more slowly; the toy device's pace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders import make_client
from families import build
from pippin.backends import fake
from pippin.backends.fake import FakeDevice
from pippin.backends.fallbacks import Fallback, Fallbacks, note_fallback, noted_in
from pippin.backends.mlx.layout import LayerCache, Layout, Reads
from pippin.backends.mlx.load import prepare
from pippin.config import ModelConfig
from pippin.errors import ConfigError
from pippin.terminal.doctor import on_mlx
from pippin.terminal.doctor.on_mlx import attention_of, described
from pippin.types import Component

PLAIN = LayerCache(0, Component.ATTENTION, reads=Reads.PIECES)


OWN_WAY = LayerCache(1, Component.ATTENTION)


STATE = LayerCache(2, Component.STATE)


def layout(*caches: LayerCache) -> Layout:
    return Layout(caches, nesting=(0,) * len(caches))


def test_a_model_that_attends_in_its_own_way_is_said_to_be_slower() -> None:
    assert attention_of(layout(PLAIN, STATE)) == (
        "1 layer through mlx-lm's function: KV is not copied"
    )
    assert attention_of(layout(PLAIN, STATE), gathers=True) == (
        "1 layer through mlx-lm's function: plain operations copy KV in each step, slower"
    )
    assert attention_of(layout(PLAIN, OWN_WAY, STATE)) == (
        "1 of 2 layers attend in their own way: concatenated KV each step, slower"
    )
    assert attention_of(layout(replace(PLAIN, reads=Reads.LATENT))) == (
        "1 layer over latents through mlx-lm's function: KV is not copied"
    )
    assert attention_of(layout(STATE)) == "none: every layer is recurrent"


@pytest.mark.parametrize("metal", [False, True])
def test_a_loaded_model_is_described_whole(metal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = prepare(*build("qwen3_5"))
    monkeypatch.setattr(on_mlx, "on_metal", lambda: metal)
    found = dict(described(loaded))
    assert set(found) == {"attention", "recurrence"}
    assert found["recurrence"].startswith("mlx-lm's kernels" if metal else "ours: ")
    assert "--safe" in dict(described(replace(loaded, safe=True)))["recurrence"]
    assert "recurrence" not in dict(described(prepare(*build("qwen3"))))


def test_a_fallback_is_logged_once_and_listed(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    with noted_in(fallbacks):
        for reason in ("it is off by 2", "it is off by 2", "it crashed"):
            note_fallback("no kernel attends", reason)
    note_fallback("of no backend", "it is logged alone")
    expected = [Fallback("no kernel attends", why) for why in ("it is off by 2", "it crashed")]
    assert list(fallbacks) == expected
    said = [record.getMessage() for record in caplog.records]
    assert said == [*map(str, expected), "of no backend: it is logged alone"]


def test_status_lists_what_the_backend_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_client().loop
    assert loop.status()["fallbacks"] == []
    monkeypatch.setattr(loop.backend, "fallbacks", (Fallback("prompts", "off"),))
    assert loop.status()["fallbacks"] == ["prompts: off"]


def test_steps_end_one_after_another_at_the_given_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds

    monkeypatch.setattr(fake, "perf_counter", lambda: now)
    monkeypatch.setattr(fake, "sleep", sleep)
    paced = FakeDevice(step_seconds=2.0)
    for step in (0, 0, 1):  # a step has several pieces of work
        paced.enqueue(step, lambda: None)
    now += 0.5
    paced.run_until(0)
    assert waits == [1.5]
    paced.run_until(1)
    assert waits == [1.5, 2.0]
    now += 10.0
    paced.enqueue(2, lambda: None)
    now += 3.0
    paced.run_until(2)  # it has ended already
    assert waits == [1.5, 2.0, 0.0]


def test_a_pace_is_for_the_toy_alone() -> None:
    assert ModelConfig(backend="fake", fake_step=0.02).fake_step == 0.02
    with pytest.raises(ConfigError, match="--backend fake"):
        ModelConfig(fake_step=0.02)
    for seconds in (-1.0, 61.0, float("nan")):
        with pytest.raises(ConfigError, match="from 0 to 60 seconds"):
            ModelConfig(backend="fake", fake_step=seconds)
