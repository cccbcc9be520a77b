"""Fixtures of the API's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from qwen35_server import allows, vocabulary
from scripted_engine import ScriptedEngine

from pippin.decode.compile import compile_grammar


@pytest.fixture
def obeys() -> Callable[[ScriptedEngine, str], bool]:
    """Whether a text is a whole reply that the last request's grammar allows."""

    def check(engine: ScriptedEngine, text: str) -> bool:
        spec = engine.submits[-1].params.grammar
        assert spec is not None, "the request has no grammar"
        return allows(compile_grammar(spec, vocabulary()), text)

    return check
