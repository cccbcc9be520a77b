"""Which draft models are refused before anything is loaded, and what one turns on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundled import BUNDLED_PATH
from pippin import LLM
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import ConfigError, LoadError
from pippin.startup.resolve import resolve_draft_model

Change = Callable[[dict[str, Any]], None]


def make_draft(folder: Path, change: Change = lambda _: None) -> str:
    """Files of a checkpoint; `change`: its tokenizer's."""
    tokenizer = json.loads((BUNDLED_PATH / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_PATH / name, folder)
    (folder / "model.safetensors").touch()
    return str(folder)


@pytest.mark.parametrize(("given", "found"), [(None, "draft"), ("auto", "auto"), ("draft",) * 2])
def test_a_draft_model_turns_drafts_on(tmp_path: Path, given: Any, found: str) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path), speculate=given)
    assert resolve_draft_model(engine, BUNDLED_PATH).speculate == found


def test_drafts_that_are_off_need_no_draft_model(tmp_path: Path) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path), speculate="off")
    assert resolve_draft_model(engine, BUNDLED_PATH) == EngineConfig(speculate="off")


def swap(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def add(tokenizer: dict[str, Any]) -> None:
    token = tokenizer["added_tokens"][0] | {"id": 8192, "content": "<|more|>"}
    tokenizer["added_tokens"].append(token)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swap, "token 300 is .* there and .* in the model, and 2 tokens differ"),
        (add, "token 8,192 is '<|more|>' there and missing in the model, and 1 tokens differ"),
    ],
    ids=["ids", "vocabulary"],
)
def test_another_tokenizer_is_refused(tmp_path: Path, change: Change, said: str) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path, change))
    said = said.replace("|", r"\|")
    with pytest.raises(LoadError, match=f"has another tokenizer than the model: {said}"):
        resolve_draft_model(engine, BUNDLED_PATH)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (EngineConfig(speculate="draft"), "no draft model is given: add --draft-model"),
        (EngineConfig(draft_model="x", speculate="mtp"), "speculate is mtp, which does not use it"),
        (EngineConfig(draft_model="no/such/model"), "no model 'no/such/model' was found"),
    ],
)
def test_what_does_not_go_together_is_refused(engine: EngineConfig, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        resolve_draft_model(engine, BUNDLED_PATH)


def test_deterministic_engines_have_no_draft_model(tmp_path: Path) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path), deterministic=True)
    with pytest.raises(ConfigError, match="remove --speculate or --deterministic"):
        resolve_draft_model(engine, BUNDLED_PATH)


def test_a_backend_without_draft_models_refuses_it(tmp_path: Path) -> None:
    engine = EngineConfig(draft_model=make_draft(tmp_path))
    with pytest.raises(LoadError, match="an option of mlx and torch, and this is fake"):
        LLM(config=Config(model=ModelConfig(backend="fake"), engine=engine))
