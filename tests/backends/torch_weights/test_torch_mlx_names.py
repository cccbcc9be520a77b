"""Checkpoints with mlx-lm's names and layouts, as it saves them: torch computes what it does."""

from __future__ import annotations

import numpy as np
import pytest

from cases import cases

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

from safetensors import safe_open

from mlx_checkpoints import as_mlx_saves, mlx_logits, torch_logits
from pippin.backends.torch.load import load
from torch_families import checkpoint

NAMES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")


@cases("name", NAMES)
def test_a_checkpoint_that_mlx_lm_saved_has_the_logits_of_mlx_lm(name: str) -> None:
    path = as_mlx_saves(name)
    found = torch_logits(load(path, dtype="float32").decoder)
    np.testing.assert_allclose(found, mlx_logits(path), rtol=0, atol=2e-4)
    original = torch_logits(load(checkpoint(name), dtype="float32").decoder)
    np.testing.assert_allclose(found, original, rtol=0, atol=1e-5)


def test_mlx_lm_saves_other_names_and_layouts() -> None:
    """What the test above is about: were they the usual ones, it would show nothing."""
    with safe_open(as_mlx_saves("qwen3_5_moe") / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        conv = file.get_slice("language_model.model.layers.0.linear_attn.conv1d.weight")
        assert conv.get_shape()[-1] == 1
    assert "language_model.lm_head.weight" in names
    assert "language_model.model.layers.0.mlp.switch_mlp.up_proj.weight" in names
