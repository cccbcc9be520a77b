"""Which weights are an MTP head: whole ones of families that are known, and no others."""

from __future__ import annotations

import pytest
from safetensors import safe_open

from bundled import BUNDLED_PATH
from cases import cases
from pippin.backends.mtp_weights import PREFIX, STORED_LESS_ONE, find_mtp_weights

with safe_open(BUNDLED_PATH / "model.safetensors", framework="np") as _opened:
    STORED = [*_opened.keys()]
HEAD = [name for name in STORED if name.startswith(PREFIX)]
MLP = "mtp.layers.0.mlp."
OF_EXPERTS = [name for name in HEAD if not name.startswith(MLP)] + [
    f"{MLP}gate.weight",
    f"{MLP}shared_expert_gate.weight",
    *(f"{MLP}shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")),
    *(f"{MLP}experts.{n}.{part}_proj.weight" for n in range(4) for part in ("gate", "up", "down")),
]


def test_the_bundled_models_head_is_found_among_its_other_weights() -> None:
    assert find_mtp_weights("qwen3_5", STORED) == {name.removeprefix(PREFIX) for name in HEAD}


def test_a_head_of_experts_is_found() -> None:
    assert len(find_mtp_weights("qwen3_next", OF_EXPERTS)) == len(OF_EXPERTS)


def test_a_checkpoint_without_one_says_so() -> None:
    others = [name for name in STORED if name not in HEAD]
    assert find_mtp_weights("qwen3_5", others) == "the checkpoint has no MTP head"


def test_families_that_are_not_known_have_none() -> None:
    assert "deepseek_v3" in find_mtp_weights("deepseek_v3", STORED)


@cases("lost", HEAD)
def test_a_head_that_lacks_a_weight_is_none(lost: str) -> None:
    assert isinstance(find_mtp_weights("qwen3_5", [n for n in HEAD if n != lost]), str)


@pytest.mark.parametrize(
    "name", ["mtp.layers.1.mlp.up_proj.weight", "mtp.fc.bias", f"{MLP}experts.99999.up_proj.weight"]
)
def test_a_head_with_a_weight_that_is_not_known_is_none(name: str) -> None:
    assert name in find_mtp_weights("qwen3_5", [*HEAD, name])


def test_norms_and_nothing_else_are_stored_less_one() -> None:
    found = {name for name in OF_EXPERTS if STORED_LESS_ONE.search(name)}
    assert found == {name for name in OF_EXPERTS if "norm" in name.removeprefix(PREFIX)}
    assert len(found) == 7
