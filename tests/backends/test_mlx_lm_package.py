"""mlx-lm's models come without its tokenizers, transformers and torch, and are its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as their_load_model
from mlx_lm.utils import quantize_model, save_config, save_model

import families
from bundled import BUNDLED_PATH
from pippin.backends.mlx.load import load_model
from processes import environment_without_compiler, run_python

HEAVY = "('transformers', 'torch', 'huggingface_hub', 'mlx_lm.utils', 'mlx_lm.tokenizer_utils')"
LOAD = (
    "import sys\n"
    "from pathlib import Path\n"
    "from pippin.backends.mlx.load import load\n"
    f"load(Path({str(BUNDLED_PATH)!r}))\n"
)


@pytest.mark.slow
def test_a_load_imports_none_of_what_it_does_not_use() -> None:
    assert run_python(f"{LOAD}print([m for m in {HEAVY} if m in sys.modules])") == "[]"


@pytest.mark.slow
def test_whoever_wants_more_of_mlx_lm_gets_all_of_it() -> None:
    code = (
        "from mlx_lm.generate import generate_step\n"  # a file by its name, then the function
        "from mlx_lm import generate, load, convert\n"
        "import mlx_lm.models.cache, mlx_lm.utils, mlx_lm.tokenizer_utils\n"
        "assert callable(generate) and callable(convert) and callable(load)\n"
        "assert mlx_lm.utils.snapshot_download and mlx_lm.tokenizer_utils.TokenizerWrapper\n"
        "from pippin.backends.mlx import layout\n"
        "print(mlx_lm.models.cache.KVCache is layout.KVCache)"
    )
    assert run_python(LOAD + code) == "True"


@pytest.mark.slow
def test_mlx_lm_that_was_there_first_is_used_as_it_is() -> None:
    code = "import mlx_lm\nbefore = mlx_lm.utils.load_model\n"
    after = "from pippin.backends.mlx.load import load_model\nprint(load_model is before)"
    assert run_python(code + LOAD + after) == "True"


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen3_5_moe"])
def test_models_are_those_that_mlx_lm_reads(family: str, bits: int | None, tmp_path: Path) -> None:
    model, config = families.build(family)
    if bits is not None:
        model, config = quantize_model(model, config, group_size=32, bits=bits)
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    (ours, our_config), (theirs, their_config) = load_model(tmp_path), their_load_model(tmp_path)
    assert our_config == their_config
    our_weights, their_weights = (
        dict(tree_flatten(model.parameters())) for model in (ours, theirs)
    )
    assert our_weights.keys() == their_weights.keys()
    assert any(name.endswith("scales") for name in our_weights) == (bits is not None)
    for name, weight in their_weights.items():
        assert our_weights[name].dtype == weight.dtype
        assert mx.array_equal(our_weights[name], weight), name
    tokens = mx.arange(24)[None]
    assert mx.array_equal(ours(tokens), theirs(tokens))


@pytest.mark.slow
def test_neither_process_of_a_server_imports_transformers_or_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pippin", "serve", "--port", "0"]
    # Of the engine as well.
    traced = environment_without_compiler() | {"PYTHONPROFILEIMPORTTIME": "1"}
    said = tmp_path / "stderr"
    with (
        said.open("w") as stderr,
        subprocess.Popen(
            command, env=traced, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            url = next(word for word in server.stdout.readline().split() if "://" in word)
            request = {"model": "stories-hybrid-20m", "prompt": "Once", "max_tokens": 3}
            reply = httpx.post(f"{url}/v1/completions", json=request)
        finally:
            server.terminate()
    assert reply.status_code == 200, reply.text
    imported = {line.rpartition("|")[2].strip() for line in said.read_text().splitlines()}
    assert {"pippin.api.app", "pippin.backends.mlx.backend"} <= imported
    assert not {name for name in imported if name.split(".")[0] in ("transformers", "torch")}
