"""Agents of pydantic-ai against the real server, on a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from asks import Answer
from qwen35_server import ARGUMENTS, CALL, THOUGHT, prompt_text
from scripted_engine import ScriptedEngine, answer_anything, serving
from served_asks import FORM, ROME, asking_fixture, call_of_form, served

pytestmark = pytest.mark.slow
KINDS = ["chat", "responses", "messages", "ollama", "vllm"]
FORM_CALL = call_of_form("final_result")
ask = asking_fixture("pydantic_ai_asks.py")


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_whole_and_streamed_with_its_counts(ask: Answer, kind: str) -> None:
    with served("It rains in Rome.") as (url, engine):
        whole, streamed = ask("whole", kind, url), ask("streamed", kind, url)
    assert whole["text"] == "It rains in Rome."
    assert "".join(streamed["texts"]) == whole["text"]
    assert len(streamed["texts"]) > 3
    assert whole["usage"][0] == engine.submits[0].prompt_len
    assert streamed["usage"] == whole["usage"]
    assert whole["thinking"] == ["Let me think."]
    assert "".join(streamed["thinking"]) == "Let me think."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_made_and_its_result_goes_back(ask: Answer, kind: str, stream: bool) -> None:
    with served(CALL, "It rains.") as (url, engine):
        assert ask("with_tool", kind, url, stream) == ["It rains.", [ARGUMENTS]]
    assert CALL in prompt_text(engine)
    assert "rain, 12 degrees" in prompt_text(engine)


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        (kind, output)
        for kind in KINDS
        for output in ("tool", "native", "prompted")
        if (kind, output) != ("messages", "native")  # the library has it for Claude's names only
    ],
)
def test_an_output_is_of_the_agents_type(ask: Answer, kind: str, output: str, obeys: Any) -> None:
    reply = FORM_CALL if output == "tool" else FORM
    with served(reply) as (url, engine):
        assert ask("form", kind, url, output, True) == ROME
        assert ask("form", kind, url, output, False) == ROME
    if engine.submits[-1].params.grammar is None:
        assert output == "prompted"
        assert "inhabitants" in prompt_text(engine)
        return
    wrong = reply.replace("inhabitants", "size")
    assert obeys(engine, THOUGHT + reply)
    assert obeys(engine, THOUGHT + wrong) is (output == "prompted")
    assert not obeys(engine, f"{THOUGHT}It rains.")


def test_texts_are_embedded(ask: Answer) -> None:
    with serving(ScriptedEngine(answer_anything)) as url:
        vectors = ask("embedded", url)
    assert (len(vectors), len(vectors[0])) == (2, 4)
