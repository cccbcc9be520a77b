"""The tools that write models: either backend, and mlx-lm, loads them; every token has text."""

from __future__ import annotations

import runpy
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from pippin import LLM, SamplingParams
from pippin.config import Config, ModelConfig

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

TOOL = Path(__file__).parents[2] / "tools" / "make_random_hybrid.py"
PLAIN = TOOL.with_name("make_plain_model.py")
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 8500}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="tools/ is not beside the tests")


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_either_backend_serves_it_and_every_token_has_text(tmp_path: Path, backend: str) -> None:
    tool = runpy.run_path(str(TOOL))
    tool["write_weights"](tmp_path, tool["TINY"], torch.bfloat16)
    tool["write_tokenizer"](tmp_path, tool["TINY"]["text_config"]["vocab_size"])
    config = Config(model=ModelConfig(model=str(tmp_path), backend=backend))  # type: ignore[arg-type]
    with LLM(config=config) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        (reply,) = llm.generate("The fox and the crow", params)
        assert llm.text.tokenizer.decode([8499]) == " word8499"
    assert reply.text


@pytest.mark.slow
def test_both_servers_libraries_load_it_and_every_token_has_text(tmp_path: Path) -> None:
    tool = runpy.run_path(str(PLAIN))
    tool["write_plain_model"](tmp_path, tool["CONFIG"] | SMALL)
    model, tokenizer = mlx_lm.load(str(tmp_path))
    assert tokenizer.decode([8499]) == " word8499"
    with LLM(str(tmp_path)) as llm:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        (reply,) = llm.generate("The fox and the crow", params)
        assert llm.text.tokenizer.decode([8499]) == " word8499"
    prompt = mx.array(tokenizer.encode("The fox and the crow"))[None]
    scores = model(prompt)[0, -1].astype(mx.float32)
    best = float(mx.max(scores))
    assert float(scores[reply.tokens[0]]) == pytest.approx(best, abs=0.02 * abs(best))
