"""Finds a config's draft model, and checks that its tokens are the model's. Reads no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pippin.config import EngineConfig, ModelConfig
from pippin.errors import LoadError
from pippin.startup.find_checkpoint import find_checkpoint
from pippin.text.tokenizer import Tokenizer


def resolve_draft_model(engine: EngineConfig, model: Path) -> EngineConfig:
    """With the draft model as a directory, and drafts on unless they were turned off."""
    if (name := engine.draft_model) is None:
        if engine.speculate == "draft":
            raise LoadError("speculate is draft, and no draft model is given: add --draft-model")
        return engine
    if engine.speculate == "off":
        return replace(engine, draft_model=None)
    if engine.speculate in ("suffix", "mtp"):
        raise LoadError(
            f"draft_model is {name}, and speculate is {engine.speculate}, which does not use it: "
            "use --speculate draft or auto, or remove --draft-model"
        )
    path = find_checkpoint(ModelConfig(model=name))
    _check_tokens(Tokenizer.load(path).vocabulary, Tokenizer.load(model).vocabulary, name)
    return replace(engine, draft_model=str(path), speculate=engine.speculate or "draft")


def _check_tokens(draft: dict[int, str], own: dict[int, str], name: str) -> None:
    differing = [id for id in draft.keys() | own.keys() if draft.get(id) != own.get(id)]
    if differing:
        first = min(differing)
        raise LoadError(
            f"draft_model: {name} has another tokenizer than the model: token {first:,} is "
            f"{_shown(draft.get(first))} there and {_shown(own.get(first))} in the model, and "
            f"{len(differing):,} tokens differ in all; use a draft model of the same family"
        )


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token[:40])
