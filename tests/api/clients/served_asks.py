"""What a server replies to the asks of client libraries. Knows no library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from asks import Answer, running
from qwen35_server import THOUGHT, says, serving_qwen
from scripted_engine import ScriptedEngine

from call_texts import write_calls

ROME = {"name": "Rome", "inhabitants": 3}
FORM = json.dumps(ROME)


def call_of_form(tool: str) -> str:
    return write_calls("qwen3_coder", [(tool, ROME)])


def asking_fixture(program: str) -> Any:
    """A fixture for a module: the program runs while the module's tests do."""

    @pytest.fixture(scope="module")
    def ask() -> Iterator[Answer]:
        with running(program) as ask:
            yield ask

    return ask


@contextmanager
def served(*replies: str) -> Iterator[tuple[str, ScriptedEngine]]:
    with serving_qwen(*(says(THOUGHT + reply) for reply in replies)) as (url, engine):
        yield url, engine
