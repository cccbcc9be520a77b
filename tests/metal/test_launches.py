"""How many kernels a step and a chunk launch on Metal, by family: budgets, counted here.

A launch costs a few microseconds whatever it computes. `tools/metal_launches.py --show FAMILY` says
what is launched.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools" / "metal_launches.py"
# At most, a layer: in a decode step, in one that verifies drafts, in a chunk of 256 tokens.
BUDGETS = {
    "llama": (10, 12, 18),
    "qwen3": (10, 14, 20),
    "gemma3": (12, 16, 24),  # two more norms
    "qwen3_5": (
        10.5,
        26,
        25.5,
    ),  # 10 or 37 of a Gated DeltaNet layer, 11 or 15 of an attention layer
    "qwen3_moe": (14, 32, 38),  # a router, its choice, three products of experts, their sum
    "gpt_oss": (18, 31, 42),  # and a bias for each product of an expert
    "qwen3_5_moe": (16.5, 41, 48.5),  # and an expert for every token
    "glm4_moe": (23, 36, 43),
    "deepseek_v3": (55, 0, 45),  # latents: plain operations over main and tail, and no drafts
}


WORKS = ("decode", "verify", "chunk")


@pytest.fixture(scope="module")
def counted() -> Any:
    """In a process of its own, where mlx-lm's kernels are made and `mx.compile` fuses."""
    done = subprocess.run(
        [sys.executable, TOOL, "--json"], capture_output=True, text=True, env={}, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_family_has_a_budget(counted: Any) -> None:
    assert set(counted) == set(BUDGETS)


@pytest.mark.parametrize("family", BUDGETS)
def test_a_layer_launches_no_more_than_its_budget(counted: Any, family: str) -> None:
    for work, budget, rest in zip(WORKS, BUDGETS[family], (4, 21, 6), strict=True):
        found = counted[family][work]
        assert found["layer"] <= budget, found["by_primitive"]
        assert found["rest"] <= rest


def test_attention_over_packed_rows_is_one_launch(counted: Any) -> None:
    """Of a decode step of llama and of qwen3: four products, two norms, and attention, rotations
    and norms of heads included."""
    for family in ("llama", "qwen3"):
        by_primitive = counted[family]["decode"]["by_primitive"]
        assert by_primitive["Matmul"] == 4
        assert by_primitive["a kernel"] == 3


def test_a_recurrent_layer_is_one_launch_between_its_products(counted: Any) -> None:
    """Of two layers of qwen3.5, one of each kind: four products each, four norms and attention."""
    by_primitive = counted["qwen3_5"]["decode"]["by_primitive"]
    assert by_primitive["Matmul"] == 8
    assert by_primitive["a kernel"] == 6
    assert "Concatenate" not in by_primitive
