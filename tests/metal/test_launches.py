"""How many kernels a step and a chunk launch on Metal, by family: budgets, counted here.

A launch costs a few microseconds whatever it computes. `tools/metal_launches.py --show FAMILY` says
what is launched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools" / "metal_launches.py"
# At most, a layer: in a decode step, in one that verifies drafts, in a chunk of 256 tokens.
BUDGETS = {
    "llama": (8, 12, 18),
    "qwen3": (8, 14, 20),
    "gemma3": (10, 16, 24),  # two more norms
    "qwen3_5": (
        8.5,
        26,
        25.5,
    ),  # 8 or 37 of a Gated DeltaNet layer, 9 or 15 of an attention layer
    "qwen3_moe": (11, 25, 36),  # a router, its choice, two products of experts, their sum
    "gpt_oss": (11, 29, 38),
    "qwen3_5_moe": (11.5, 37, 47.5),  # every token's expert is one more
    "glm4_moe": (11, 25, 41),  # likewise
    "deepseek_v3": (17, 0, 43),  # of latents no drafts are verified
}


WORKS = ("decode", "verify", "chunk")


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """In a process of its own, where mlx-lm's kernels are made and `mx.compile` fuses.

    mlx keeps what it compiles in a folder of the temporary directory, and reads what another
    process is still writing there.
    """
    own = {"TMPDIR": str(tmp_path_factory.mktemp("compiled")), "PATH": os.environ["PATH"]}
    command = [sys.executable, TOOL, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=own, check=False)
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
