"""A draft model as a user has it: the same replies, and its drafts counted by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

from safetensors.torch import save_file

from bundled import BUNDLED_PATH
from families import CONFIGS
from pippin import LLM, SamplingParams
from pippin.config import Config, EngineConfig, ModelConfig
from shared import engine_beside
from torch_families import weights

STORY = "Once upon a time there was a little dog named Max. He had a red ball."
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture
def draft(tmp_path: Path) -> str:
    """A small random model that spells as the bundled one does."""
    config = CONFIGS["llama"] | {"vocab_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights(config), tmp_path / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_PATH / name, tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("backend", ["torch"])
def test_replies_are_the_same_and_drafts_are_counted(backend: str, draft: str) -> None:
    model = ModelConfig(backend=backend, dtype="float32")  # type: ignore[arg-type]
    engine = EngineConfig(draft_model=draft, memory="1GB", max_running=4)
    with LLM(config=Config(model=model, engine=engine)) as llm:
        assert llm.metrics.drafters.keys() == {"draft"}
        assert engine_beside(llm, speculate="auto").metrics.drafters.keys() == {"draft", "suffix"}
        without = engine_beside(llm, speculate="off")
        speculation = llm.loop.scheduler.speculation
        assert speculation is not None
        speculation.policy = None
        for params in (GREEDY, replace(GREEDY, temperature=0.8, seed=3)):
            (found,), (expected,) = llm.generate(STORY, params), without.generate(STORY, params)
            assert found.tokens == expected.tokens
        assert llm.metrics.drafters["draft"].rows > 0
