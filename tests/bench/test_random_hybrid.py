"""The tool that writes a hybrid of random weights: it is served, and every token has text."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from pippin import LLM, SamplingParams
from pippin.config import Config, ModelConfig
from qwen35 import END_OF_TURN

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

TOOL = Path(__file__).parents[2] / "tools" / "make_random_hybrid.py"


@pytest.mark.skipif(not TOOL.exists(), reason="tools/ is not beside the tests")
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


@pytest.mark.skipif(not TOOL.exists(), reason="tools/ is not beside the tests")
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
