"""The tools that write models: either backend, and mlx-lm, loads them; every token has text."""

from __future__ import annotations

import runpy
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from pippin import LLM, SamplingParams
from pippin.config import Config, ModelConfig
from qwen35 import END_OF_TURN

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

TOOL = Path(__file__).parents[2] / "tools" / "make_random_hybrid.py"
SMALL = {"num_hidden_layers": 2, "vocab_size": 8500}
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


def test_the_shape_for_agents_has_qwens_words_and_room_for_their_prompts(tmp_path: Path) -> None:
    runpy.run_path(str(TOOL))["write_model"](tmp_path, "agents")
    with LLM(config=Config(model=ModelConfig(model=str(tmp_path)))) as llm:
        assert llm.max_len == 131_072
        assert llm.text.chat is not None
        assert llm.text.formats.tools is not None
        assert llm.text.tokenizer.eos_ids == (END_OF_TURN, END_OF_TURN - 2)
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        (reply,) = llm.generate("The fox", params)
        reasoned = llm.generate(["<think>\n"] * 8, SamplingParams(max_tokens=999, stop="</think>"))
    assert len(reply.tokens) == 2
    assert all(each.finish_reason == "stop" for each in reasoned)


@pytest.mark.slow
def test_both_servers_libraries_load_it_and_every_token_has_text(tmp_path: Path) -> None:
    tool = runpy.run_path(str(TOOL))
    tool["write_weights"](tmp_path, tool["SMOLLM2_135M"] | SMALL, torch.bfloat16)
    tool["write_tokenizer"](tmp_path, SMALL["vocab_size"])
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
