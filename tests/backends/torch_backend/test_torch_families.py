"""Every family that torch serves, against transformers and against mlx on the same checkpoint.

Both judge what was said, given what was said before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from cases import cases

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import mlx.core as mx
import torch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from builders import Reply
from bundled import BUNDLED_PATH
from families import WINDOW
from near_ties import TOLERANCE, assert_best, log_softmax
from pippin.backends.torch.config import FAMILIES, read_shape
from pippin.backends.torch.models.build import build_decoder
from pippin.backends.torch.shapes import AttentionShape
from pippin.errors import LoadError, UnsupportedLayout
from reference import BUNDLED
from serving import TORCH, make_client, make_prompt
from torch_families import TORCH_CONFIGS, checkpoint, weights

MAX_TOKENS = 12
NAMES = (BUNDLED, *TORCH_CONFIGS)
# Windows that only one of the two reads: transformers' Llama has none, mlx-lm's Llama has none
# that layer_types does not name, and mlx-lm's Qwen3 has none, nor any bias.
NOT_TRANSFORMERS = ("llama_windows",)
NOT_MLX = ("mistral", "qwen3_windows", "qwen3_biases")
# mlx-lm adds the norms' 1 while the bundled checkpoint is still float16.
MLX_TOLERANCE = {BUNDLED: 1e-2}


@cache
def replies(name: str) -> list[Reply]:
    """Of prompts shorter and longer than a block, together."""
    client = make_client(f"{TORCH}{name}")
    prompts = [make_prompt(f"{TORCH}{name}", length, seed=length) for length in (3, 64, 150)]
    found = [client.submit(p, max_tokens=MAX_TOKENS, logprobs=5) for p in prompts]
    client.run()
    return found


def check(reply: Reply, logprobs: np.ndarray, tolerance: float) -> None:
    """`logprobs` [tokens, vocab]: of what may follow each token of prompt and reply."""
    rows = logprobs[len(reply.prompt) - 1 : -1]
    assert_best(reply.tokens, rows, margin=2 * tolerance)
    for scored, row in zip(reply.logprobs, rows, strict=True):
        expected = row[list(scored.top_ids)]
        np.testing.assert_allclose(scored.top_logprobs, expected, rtol=0, atol=tolerance)


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
    for reply in replies(name):
        with torch.no_grad():
            logits = model(torch.tensor([[*reply.prompt, *reply.tokens]])).logits[0]
        check(reply, log_softmax(logits.numpy()), TOLERANCE)


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
    assert {str(config["model_type"]) for config in TORCH_CONFIGS.values()} <= set(FAMILIES)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"use_sliding_window": True, "model_type": "qwen3_moe"}, "sliding"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        ({"quantization_config": {}}, "quantized"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
    ],
)
def test_what_a_family_may_have_and_is_not_served_is_refused(
    changed: dict[str, object], named: str
) -> None:
    with pytest.raises(LoadError, match=named):
        read_shape(TORCH_CONFIGS["qwen3"] | changed)


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
