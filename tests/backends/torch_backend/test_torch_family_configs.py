"""How configs of families whose layers all attend are read."""

from __future__ import annotations

import re

import pytest

from cases import cases

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")


from attention_families import ATTENTION_CONFIGS
from pippin.backends.torch.config import read_shape
from pippin.backends.torch.families.table import FAMILY
from pippin.backends.torch.shapes import AttentionShape, ModelShape
from pippin.errors import LoadError


def shape_of(name: str, **changed: object) -> ModelShape:
    return read_shape(ATTENTION_CONFIGS[name] | changed)


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "reads both ways"),
        ("gemma3", {"hidden_activation": "relu"}, "relu"),
        ("phi3", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("qwen2_moe", {"use_sliding_window": True}, "sliding windows"),
        ("mixtral", {"num_local_experts": None}, "num_experts"),
    ],
)
def test_what_a_family_may_have_and_is_not_served_is_refused_by_name(
    family: str, changed: dict[str, object], named: str
) -> None:
    config = ATTENTION_CONFIGS[family] | changed
    with pytest.raises(LoadError, match=re.escape(named)):
        read_shape({key: value for key, value in config.items() if value is not None})


@cases("family", ATTENTION_CONFIGS)
def test_keys_of_other_families_change_nothing(family: str) -> None:
    config = ATTENTION_CONFIGS[family]
    foreign = {"attention_multiplier": 9.0, "residual_multiplier": 9.0, "logit_scale": 9.0}
    foreign |= {"attn_logit_softcapping": 9.0, "swiglu_limit": 9.0, "no_rope_layers": [0, 0]}
    read = {key for key in foreign if key in FAMILY[str(config["model_type"])].options}
    others = {key: value for key, value in foreign.items() if key not in read}
    assert read_shape(config | others) == read_shape(config)


def test_layers_that_a_config_does_not_list_are_those_of_the_family() -> None:
    """As transformers has it."""
    import transformers

    for name in ("gemma2", "gemma3", "gpt_oss", "olmo3", "cohere2", "smollm3", "phi3", "mixtral"):
        config = {key: value for key, value in ATTENTION_CONFIGS[name].items() if value}
        config |= {"num_hidden_layers": 8, "sliding_window": 32}
        for key in ("layer_types", "no_rope_layers"):
            config.pop(key, None)
        theirs = transformers.AutoConfig.for_model(**config)
        types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 8
        rotated = getattr(theirs, "no_rope_layers", [name != "cohere2" or "s" in t for t in types])
        mixers = read_shape(config).mixers(AttentionShape)
        assert ["sliding_attention" if mixer.window else "full_attention" for mixer in mixers] == (
            types
        ), name
        if name == "smollm3":
            assert [mixer.rope.dim > 0 for mixer in mixers] == list(map(bool, rotated))
        if name == "cohere2":
            assert all((mixer.rope.dim > 0) == (mixer.window > 0) for mixer in mixers)


def test_gemma_turns_keys_of_windows_more_slowly() -> None:
    windowed, full = shape_of("gemma3").mixers(AttentionShape)
    assert (windowed.rope.theta, full.rope.theta) == (1e4, 1e6)
    scaled = shape_of("gemma3", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert [m.rope.kind for m in scaled.mixers(AttentionShape)] == ["default", "linear"]
