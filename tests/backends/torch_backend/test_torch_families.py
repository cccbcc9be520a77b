"""Every family that torch serves, against transformers and against mlx on the same checkpoint.

Both judge what was said, given what was said before it. How configs are read, and refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import mlx.core as mx
import torch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from attention_families import ATTENTION_CONFIGS
from builders import Client, Reply
from bundled import BUNDLED_PATH
from cases import cases
from families import WINDOW
from near_ties import TOLERANCE, assert_best, log_softmax
from oracle_drafter import OracleDrafter
from pippin.backends.torch.config import FAMILIES, read_shape
from pippin.backends.torch.families.table import FAMILY
from pippin.backends.torch.models.build import build_decoder
from pippin.backends.torch.shapes import AttentionShape, ModelShape
from pippin.errors import LoadError, UnsupportedLayout
from pippin.scheduler import admission, memory
from pippin.scheduler.request import Request
from pippin.scheduler.speculation import Speculation
from reference import BUNDLED
from serving import TORCH, check_idle, make_client, make_prompt, spec_of
from torch_families import TORCH_CONFIGS, checkpoint, weights
from transformers_families import STATE_CONFIGS, WRITTEN_CONFIGS, score

MAX_TOKENS = 12


NAMES = (BUNDLED, *TORCH_CONFIGS)


# Windows that only one of the two reads: transformers' Llama has none, mlx-lm's Llama has none
# that layer_types does not name, and mlx-lm's Qwen3 has none, nor any bias.
NOT_TRANSFORMERS = ("llama_windows",)


NOT_MLX = ("mistral", "qwen3_windows", "qwen3_biases")


# mlx-lm adds the norms' 1 while the bundled checkpoint is still float16.
MLX_TOLERANCE = {BUNDLED: 1e-2}


@cache
def replies(name: str, backend: str = TORCH) -> list[Reply]:
    """Of prompts shorter and longer than a block, together."""
    client = make_client(f"{backend}{name}")
    prompts = [make_prompt(f"{backend}{name}", length, seed=length) for length in (3, 64, 150)]
    found = [client.submit(p, max_tokens=MAX_TOKENS, logprobs=5) for p in prompts]
    client.run()
    return found


def check(reply: Reply, logprobs: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """`logprobs` [tokens, vocab]: of what may follow each token of prompt and reply."""
    rows = logprobs[len(reply.prompt) - 1 :][: len(reply.tokens)]
    assert_best(reply.tokens, rows, margin=2 * tolerance)
    for scored, row in zip(reply.logprobs or (), rows, strict=bool(reply.logprobs)):
        expected = row[list(scored.top_ids)]
        np.testing.assert_allclose(scored.top_logprobs, expected, rtol=0, atol=tolerance)


def check_by_transformers(family: str, replies: list[Reply]) -> None:
    texts = [[*reply.prompt, *reply.tokens[:-1]] for reply in replies]
    for reply, rows in zip(replies, score(family, texts), strict=True):
        check(reply, rows)


@pytest.fixture(scope="module")
def transformers() -> Iterator[object]:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    return transformers


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_TRANSFORMERS])
def test_replies_are_what_transformers_says(name: str, transformers) -> None:  # type: ignore[no-untyped-def]
    path = BUNDLED_PATH if name == BUNDLED else checkpoint(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = [(reply, TOLERANCE) for reply in replies(name)]
    if name == BUNDLED:  # of mlx too: a reference that shares no code with mlx-lm
        found += [(reply, MLX_TOLERANCE[name]) for reply in replies(name, "")]
    for reply, tolerance in found:
        with torch.no_grad():
            logits = model(torch.tensor([[*reply.prompt, *reply.tokens]])).logits[0]
        check(reply, log_softmax(logits.numpy()), tolerance)


@pytest.mark.slow
@cases("name", [name for name in NAMES if name not in NOT_MLX])
def test_replies_are_what_mlx_says(name: str) -> None:
    path = BUNDLED_PATH if name == BUNDLED else checkpoint(name)
    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    for reply in replies(name):
        tokens = mx.array([[*reply.prompt, *reply.tokens]])
        logits = np.array(model(tokens, cache=make_prompt_cache(model))[0])
        check(reply, log_softmax(logits), MLX_TOLERANCE.get(name, TOLERANCE))


def test_what_it_lacks_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedLayout, match="gemma4_text models are not served by the torch"):
        read_shape({"model_type": "gemma4_text"})
    served = (*TORCH_CONFIGS.values(), *WRITTEN_CONFIGS.values())
    assert {str(config["model_type"]) for config in served} <= set(FAMILIES)


@cases(
    ("configs", "family", "changed", "named"),
    [
        (TORCH_CONFIGS, "qwen3", {"use_sliding_window": True, "model_type": "qwen3_moe"}, "slidin"),
        (TORCH_CONFIGS, "qwen3", {"hidden_act": "gelu"}, "gelu"),
        (TORCH_CONFIGS, "qwen3", {"rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        (TORCH_CONFIGS, "qwen3", {"quantization_config": {}}, "quantized"),
        (TORCH_CONFIGS, "qwen3", {"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        (ATTENTION_CONFIGS, "gemma3", {"use_bidirectional_attention": True}, "reads both ways"),
        (ATTENTION_CONFIGS, "gemma3", {"hidden_activation": "relu"}, "relu"),
        (ATTENTION_CONFIGS, "phi3", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (ATTENTION_CONFIGS, "olmo3", {"layer_types": ["chunked_attention"] * 2}, "chunked_attent"),
        (ATTENTION_CONFIGS, "qwen2_moe", {"use_sliding_window": True}, "sliding windows"),
        (ATTENTION_CONFIGS, "mixtral", {"num_local_experts": None}, "num_experts"),
        (STATE_CONFIGS, "lfm2", {"layer_types": ["conv", "sliding_attention"]}, "sliding_attent"),
        (STATE_CONFIGS, "nemotron_h", {"hybrid_override_pattern": "M?"}, "blocks ?"),
        (STATE_CONFIGS, "nemotron_h", {"mlp_hidden_act": "silu"}, "silu"),
        (STATE_CONFIGS, "nemotron_h_moe", {"moe_latent_size": 8}, "moe_latent_size"),
        (STATE_CONFIGS, "lfm2_moe", {"use_expert_bias": False}, "use_expert_bias"),
        (STATE_CONFIGS, "granitemoehybrid", {"hidden_act": "gelu"}, "gelu"),
        (STATE_CONFIGS, "granitemoehybrid", {"layer_types": ["mamba", "window"]}, "window"),
        (STATE_CONFIGS, "deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        (STATE_CONFIGS, "deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        (STATE_CONFIGS, "deepseek_v3", {"rope_scaling": {"type": "dynamic"}}, "dynamic"),
    ],
)
def test_what_a_family_may_have_and_is_not_served_is_refused_by_name(
    configs: Mapping[str, dict[str, Any]], family: str, changed: dict[str, object], named: str
) -> None:
    config = configs[family] | changed
    with pytest.raises(LoadError, match=re.escape(named)):
        read_shape({key: value for key, value in config.items() if value is not None})


def test_which_layers_have_windows() -> None:
    """As transformers has it for each family."""

    def windows(name: str, **changed: object) -> list[int]:
        shape = read_shape(TORCH_CONFIGS[name] | changed)
        return [mixer.window for mixer in shape.mixers(AttentionShape)]

    assert windows("mistral") == [WINDOW, WINDOW]
    assert windows("mistral", sliding_window=None) == [0, 0]
    config = dict(TORCH_CONFIGS["mistral"])
    del config["sliding_window"]
    assert read_shape(config).window == 4096
    assert windows("qwen3_windows") == [0, WINDOW]
    assert windows("qwen3_windows", use_sliding_window=False) == [0, 0]
    assert windows("qwen3_windows", max_window_layers=2) == [0, 0]
    assert windows("llama_windows") == [WINDOW, 0]
    assert windows("llama", sliding_window=WINDOW) == [0, 0]


@pytest.mark.parametrize(
    ("name", "changed", "weight"),
    [
        ("llama_biases", {"mlp_bias": False}, "gate_proj.bias"),
        ("llama_biases", {"attention_bias": False}, "q_proj.bias"),
        ("qwen2", {"model_type": "mistral"}, "q_proj.bias"),
        ("llama", {"mlp_bias": True}, "gate_proj.bias"),
        ("qwen3", {"attention_bias": True}, "q_proj.bias"),
    ],
)
def test_biases_that_config_and_weights_disagree_about_are_refused_by_name(
    name: str, changed: dict[str, object], weight: str
) -> None:
    config = TORCH_CONFIGS[name] | changed
    found = Held(weights(TORCH_CONFIGS[name]))
    device = torch.device("cpu")
    with pytest.raises(LoadError, match=re.escape(weight)):
        build_decoder(read_shape(config), found, torch.float32, device, 64)


class Held:
    """Weights in memory."""

    def __init__(self, found: dict[str, torch.Tensor]) -> None:
        self._found = found

    def has(self, name: str) -> bool:
        return name in self._found

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        if not self.has(name):
            raise LoadError(f"no {name}")
        return self._found[name]


def shape_of(name: str, **changed: object) -> ModelShape:
    return read_shape(ATTENTION_CONFIGS[name] | changed)


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


def ask(
    client: Client, prompts: list[list[int]], max_tokens: int = 6, logprobs: int | None = 3
) -> list[Reply]:
    replies = [client.submit(p, max_tokens=max_tokens, logprobs=logprobs) for p in prompts]
    client.run()
    check_idle(client)
    return replies


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("family", WRITTEN_CONFIGS)
def test_cold_joined_warm_and_preempted_replies_are_what_transformers_says(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{TORCH}{family}"
    for module in (admission, memory):
        monkeypatch.setattr(module, "GROWTH_TOKENS", 4)
    client = make_client(name, chunk=64, num_slots=4)
    short, long = make_prompt(name, 30, seed=0), make_prompt(name, 150, seed=1)
    replies = ask(client, [short])
    replies += ask(client, [long, make_prompt(name, 61, seed=2), make_prompt(name, 5, seed=3)])
    turn = [*short, *replies[0].tokens, *make_prompt(name, 2, seed=4)]
    warm = ask(client, [[*long[:130], *make_prompt(name, 3, seed=5)], turn, long])
    assert all(reply.cached_tokens for reply in warm)
    pressed = make_client(name, capacity_bytes=3 * client.loop.backend.row_bytes(64))
    prompts = [make_prompt(name, 50 + number, seed=number) for number in range(6)]
    preempted = ask(pressed, prompts, max_tokens=14)
    assert pressed.loop.scheduler.metrics.preemptions > 0
    check_by_transformers(family, [*replies, *warm, *preempted])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("family", ["lfm2", "nemotron_h", "deepseek_v3"])
def test_replies_with_drafts_are_what_transformers_says(family: str) -> None:
    name, depth = f"{TORCH}{family}", 3
    prompts = [make_prompt(name, num_tokens, seed=num_tokens) for num_tokens in (5, 70)]
    expected = ask(make_client(name), prompts, max_tokens=16)
    known = {tuple(reply.prompt): reply.tokens for reply in expected}

    def reply_of(request: Request) -> Sequence[int]:
        return known[tuple(request.prompt.tolist())]

    drafter = OracleDrafter(reply_of, 0.7, spec_of(name).vocab_size)
    client = make_client(name, speculation=Speculation(drafter, depth, lambda _: depth))
    replies = ask(client, prompts, max_tokens=16, logprobs=None)  # with them there are no drafts
    metrics = client.loop.scheduler.metrics
    assert 0 < metrics.accepted_tokens < metrics.drafted_tokens
    warm = ask(client, [[*reply.prompt, *reply.tokens] for reply in replies])
    assert all(reply.cached_tokens for reply in warm)
    check_by_transformers(family, [*replies, *warm])
