"""What a load chose, in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from families import build
from pippin.backends.mlx.describe import attention, describe, recurrences
from pippin.backends.mlx.layout import LayerCache, Layout, Reads
from pippin.backends.mlx.load import prepare
from pippin.backends.mlx.recurrent import choices
from pippin.backends.mlx.recurrent.calls import Kind
from pippin.backends.mlx.recurrent.choices import Choice, Times
from pippin.types import Component

PLAIN = LayerCache(0, Component.ATTENTION, reads=Reads.PIECES)
OWN_WAY = LayerCache(1, Component.ATTENTION)
STATE = LayerCache(2, Component.STATE)


def layout(*caches: LayerCache) -> Layout:
    return Layout(caches, nesting=(0,) * len(caches))


def test_a_model_that_attends_in_its_own_way_is_said_to_be_slower() -> None:
    assert attention(layout(PLAIN, STATE)) == (
        "1 layer through mlx-lm's function: KV is not copied"
    )
    assert attention(layout(PLAIN), timed=True) == (
        "1 layer through mlx-lm's function: the faster way by times"
    )
    assert attention(layout(PLAIN, STATE), gathers=True) == (
        "1 layer through mlx-lm's function: plain operations copy KV in each step, slower"
    )
    assert attention(layout(PLAIN, OWN_WAY, STATE)) == (
        "1 of 2 layers attend in their own way: concatenated KV each step, slower"
    )
    assert attention(layout(replace(PLAIN, reads=Reads.LATENT))) == (
        "1 layer over latents through mlx-lm's function: KV is not copied"
    )
    assert attention(layout(STATE)) == "none: every layer is recurrent"


def test_times_come_with_the_file_that_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    timed = Choice(Kind("ssm_update", "prefill", "B 2x16"), Times(2.0, 1.0))
    untimed = Choice(Kind("ssm_update", "decode", "B 2x16"), obstacle="no kernel")
    assert list(recurrences([timed, untimed])) == [
        ("prefill recurrence", "mlx-lm's: 2.00 ms ours, 1.00 ms mlx-lm's (B 2x16)"),
        ("decode recurrence", "ours: no kernel (B 2x16)"),
        (
            "recurrence times",
            f"in {Path('/caches/pippin/recurrences.json')}; delete it to time again",
        ),
    ]
    assert [name for name, _ in recurrences([untimed])] == ["decode recurrence"]


def test_a_loaded_model_is_described_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "on_metal", lambda: False)
    described = dict(describe(prepare(*build("qwen3_5"))))
    expected = {"attention", "prefill recurrence", "decode recurrence"}
    assert set(described) == expected
    assert described["decode recurrence"].startswith("ours: mlx-lm has only a Python loop here")
    assert "recurrence" not in " ".join(dict(describe(prepare(*build("qwen3")))))
