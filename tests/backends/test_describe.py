"""What a load chose, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from families import build
from pippin.backends.mlx import describe as describe_module
from pippin.backends.mlx.describe import attention, describe
from pippin.backends.mlx.layout import LayerCache, Layout, Reads
from pippin.backends.mlx.load import prepare
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


@pytest.mark.parametrize("metal", [False, True])
def test_a_loaded_model_is_described_whole(metal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = prepare(*build("qwen3_5"))
    monkeypatch.setattr(describe_module, "on_metal", lambda: metal)
    described = dict(describe(loaded))
    assert set(described) == {"attention", "recurrence"}
    assert described["recurrence"].startswith("mlx-lm's kernels" if metal else "ours: ")
    assert "--safe" in dict(describe(replace(loaded, safe=True)))["recurrence"]
    assert "recurrence" not in dict(describe(prepare(*build("qwen3"))))
