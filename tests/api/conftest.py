"""Fixtures of the API's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from qwen35_server import MODEL, TEXT
from scripted_engine import ScriptedEngine

from pippin.decode.compile import compile_grammar
from pippin.decode.vocabulary import Vocabulary
from pippin.grammars import vocabulary_of
from qwen35 import END_OF_TURN


@cache
def _vocabulary() -> Vocabulary:
    return vocabulary_of(TEXT.tokenizer, MODEL.vocab_size)


@pytest.fixture
def obeys() -> Callable[[ScriptedEngine, str], bool]:
    """Whether a text is a whole reply that the last request's grammar allows."""

    def check(engine: ScriptedEngine, text: str) -> bool:
        spec = engine.submits[-1].params.grammar
        assert spec is not None, "the request has no grammar"
        tokens = [*TEXT.tokenizer.encode(text, add_special_tokens=False), END_OF_TURN]
        grammar = compile_grammar(spec, _vocabulary())
        return grammar._matcher.validate_tokens(tokens) == len(tokens)

    return check
