"""Families with indexers, chunks, lent KV and capped scores against transformers on torch.

Transformers draws and writes small checkpoints and scores random texts. Pippin reads the same
checkpoints and scores the texts, in chunks that share forwards, and again after a warm prefix.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from every_family import EVERY
from families import CONFIGS, VOCAB
from near_ties import TOLERANCE
from pippin.backends.mlx.load import load
from processes import is_installed
from serving import make_client
from small_models import Config

pytestmark = pytest.mark.slow

if not is_installed("torch"):
    pytest.skip("torch is not installed: pip install 'pippin[reference]'", allow_module_level=True)

LENS = (70, 41)

# In a process of its own, for all families: torch brings threads and a BLAS that no other test has.
WRITE = """
import json, pathlib, sys, warnings
warnings.simplefilter("ignore")
import numpy, torch, transformers
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
for name, job in json.load(sys.stdin).items():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**job["text"])
    build = transformers.AutoModelForCausalLM.from_config
    model = build(config, dtype=torch.float32, attn_implementation="eager").eval()
    for key, value in model.named_parameters():
        if value.ndim > 1:
            scale = job["embedding_scale"] if "embed" in key else 1.5 / value.shape[-1] ** 0.5
            torch.nn.init.normal_(value, 0, scale)
    folder = pathlib.Path(sys.argv[1], name)
    model.save_pretrained(folder)
    if job["config"]:
        (folder / "config.json").write_text(json.dumps(job["config"]))
    weights = {}
    for key, value in load_file(folder / "model.safetensors").items():
        for old, new in job["renamed"]:
            key = key.replace(old, new, 1)
        weights[key] = value
    for key, like in job["unused"].items():
        weights[key] = weights[like].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        logits = [model(torch.tensor([t]), use_cache=False).logits[0] for t in job["texts"]]
    numpy.savez(folder / "scores.npz", *(torch.log_softmax(x, -1).numpy() for x in logits))
"""


def make_job(
    text: Config,
    config: Config | None = None,
    *,
    renamed: list[tuple[str, str]] | None = None,
    unused: dict[str, str] | None = None,
) -> dict[str, Any]:
    """`config`: where it is not what transformers writes. `renamed`: parts of weights' names, as
    checkpoints have them that see images too. `unused`: weights that mlx-lm wants and no layer
    reads, each a copy of another."""
    return {
        "text": text,
        "config": config,
        "renamed": renamed or [],
        "unused": unused or {},
        "embedding_scale": text.get("initializer_range", 1.0),
        "texts": TEXTS,
    }


def _known(config: Config, *names: str) -> Config:
    return {name: config[name] for name in names}


TEXTS = [np.random.default_rng(n).integers(2, VOCAB, n).tolist() for n in LENS]
_GEMMA3N = CONFIGS["gemma3n"]["text_config"] | {"model_type": "gemma3n_text"}
_LLAMA4 = CONFIGS["llama4"]["text_config"] | {
    "model_type": "llama4_text",
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "no_rope_layers": [1, 1, 1, 0],
    "moe_layers": [1, 3],
}
_DEEPSEEK = CONFIGS["deepseek_v32"] | {"head_dim": 8, "n_group": 1, "topk_group": 1}
_GLM = _DEEPSEEK | {
    "model_type": "glm_moe_dsa",
    "rope_parameters": EVERY["glm_moe_dsa"]["rope_parameters"],
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "attention_bias": False,
}
_SIZES = ("hidden_size", "vocab_size", "intermediate_size", "shared_intermediate_size", "head_dim")
_COUNTS = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "num_local_experts")
_INDEX = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
_MINIMAX = _known(EVERY["minimax_m3_vl"]["text_config"], *_SIZES, *_COUNTS, *_INDEX) | {
    "model_type": "minimax_m3_vl_text",
    "num_experts_per_tok": 4,
    "max_position_embeddings": 2048,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["sparse", "sparse"],
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
}


def _nested(name: str, text: Config) -> Config:
    return {"model_type": name, "text_config": text}


_LENT = "model.language_model.layers.{}.self_attn.{}.weight"
JOBS = {
    "gemma2": make_job(CONFIGS["gemma2"] | {"tie_word_embeddings": True}),
    "gemma3n": make_job(
        _GEMMA3N,
        _nested("gemma3n", _GEMMA3N),
        renamed=[("model.", "model.language_model.")],
        unused={
            _LENT.format(layer, part): _LENT.format(layer - 2, part)
            for layer in (4, 5)
            for part in ("k_proj", "v_proj", "k_norm")
        },
    ),
    "llama4": make_job(
        _LLAMA4,
        _nested("llama4", _LLAMA4),
        renamed=[("model.", "language_model.model."), ("lm_head", "language_model.lm_head")],
    ),
    "deepseek_v32": make_job(_DEEPSEEK),
    "glm_moe_dsa": make_job(_GLM),
    "minimax_m3_vl": make_job(
        _MINIMAX,
        _nested("minimax_m3_vl", _MINIMAX),
        renamed=[
            ("model.", "language_model.model."),
            ("lm_head", "language_model.lm_head"),
            (".mlp.gate.e_score", ".block_sparse_moe.e_score"),
            (".mlp.experts.gate_up_proj", ".block_sparse_moe.switch_mlp.gate_up_proj.weight"),
            (".mlp.experts.down_proj", ".block_sparse_moe.switch_mlp.down_proj.weight"),
            (".mlp.", ".block_sparse_moe."),
            ("indexer.", "index_"),
        ],
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    done = subprocess.run(
        [sys.executable, "-c", WRITE, str(folder)],
        input=json.dumps(JOBS),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("family", JOBS)
def test_texts_are_scored_as_by_transformers(checkpoints: Path, family: str) -> None:
    scores = list(np.load(checkpoints / family / "scores.npz").values())
    client = make_client(family, model=load(checkpoints / family), chunk=64, num_slots=4)
    for _ in ("cold", "warm"):
        replies = [client.submit(t, max_tokens=1, prompt_logprobs=0) for t in TEXTS]
        last = [client.submit(t, max_tokens=1, logprobs=1) for t in TEXTS]
        client.run()
        for text, rows, reply, end in zip(TEXTS, scores, replies, last, strict=True):
            found = [scored.logprob for scored in reply.prompt_logprobs]
            expected = rows[range(len(text) - 1), text[1:]]
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
            assert abs(end.logprobs[0].logprob - rows[-1].max()) < TOLERANCE
