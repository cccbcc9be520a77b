"""The tool that writes a plain attention model: both servers can load what it writes."""

from __future__ import annotations

import runpy
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from pippin import LLM, SamplingParams

TOOL = Path(__file__).parents[2] / "tools" / "make_plain_model.py"
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 8500}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@pytest.mark.slow
@pytest.mark.skipif(not TOOL.exists(), reason="tools/ is not beside the tests")
def test_both_servers_libraries_load_it_and_every_token_has_text(tmp_path: Path) -> None:
    tool = runpy.run_path(str(TOOL))
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
