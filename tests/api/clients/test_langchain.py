"""LangChain's OpenAI, Anthropic and Ollama models against the real server, on a scripted engine."""

from __future__ import annotations

from typing import Any

import pytest
from asks import Answer
from qwen35_server import ARGUMENTS, CALL, THOUGHT, WEATHER, prompt_text
from scripted_engine import ScriptedEngine, answer_anything, serving
from served_asks import FORM, ROME, asking_fixture, call_of_form, served

pytestmark = pytest.mark.slow
KINDS = ["openai_chat", "openai_responses", "anthropic_messages", "ollama_chat"]
TOOL = {"title": "get_weather", "description": "The weather of some days.", **WEATHER}
FORM_CALL = call_of_form("City")
ask = asking_fixture("langchain_asks.py")


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_is_whole_streamed_and_asynchronous(ask: Answer, kind: str) -> None:
    with served("It rains in Rome.") as (url, engine):
        whole, streamed = ask("whole", kind, url), ask("streamed", kind, url)
        texts = ask("asynchronous", kind, url)
    assert whole["text"] == "It rains in Rome."
    assert "".join(streamed["texts"]) == whole["text"]
    assert len(streamed["texts"]) > 5
    assert texts == [whole["text"]] * 2
    assert whole["usage"]["input_tokens"] == engine.submits[0].prompt_len
    for count in ("input_tokens", "output_tokens", "total_tokens"):
        assert streamed["usage"][count] == whole["usage"][count]


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_made_and_its_result_goes_back(ask: Answer, kind: str) -> None:
    with served(CALL, "It rains.") as (url, engine):
        assert ask("answered", kind, url, TOOL) == "It rains."
    assert CALL in prompt_text(engine)
    assert "rain, 12 degrees" in prompt_text(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_streamed_call_adds_up_to_its_arguments(ask: Answer, kind: str) -> None:
    with served(CALL) as (url, _):
        [call] = ask("streamed_call", kind, url, TOOL)
    assert (call["name"], call["args"]) == ("get_weather", ARGUMENTS)


@pytest.mark.parametrize("choice", ["any", "get_weather"])
@pytest.mark.parametrize("kind", KINDS[:3])  # Ollama's API has no tool_choice
def test_a_forced_call_is_the_only_reply(ask: Answer, kind: str, choice: str, obeys: Any) -> None:
    with served(CALL) as (url, engine):
        _, [call] = ask("called", kind, url, TOOL, choice)
    assert (call["name"], call["args"]) == ("get_weather", ARGUMENTS)
    assert obeys(engine, THOUGHT + CALL)
    assert not obeys(engine, f"{THOUGHT}It rains.")
    assert not obeys(engine, THOUGHT + CALL.replace("3", "three"))


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, method) for kind in KINDS for method in ("json_schema", "function_calling")),
        ("openai_chat", "json_mode"),
        ("openai_responses", "json_mode"),
        ("ollama_chat", "json_mode"),
    ],
)
def test_structured_output_is_of_the_models_type(
    ask: Answer, kind: str, method: str, obeys: Any
) -> None:
    reply = FORM_CALL if method == "function_calling" else FORM
    with served(reply) as (url, engine):
        assert ask("form", kind, url, method) == ROME
    if (kind, method) == ("ollama_chat", "function_calling"):
        return  # without tool_choice any reply is one
    wrong = reply.replace("inhabitants", "size")
    assert obeys(engine, THOUGHT + reply)
    assert obeys(engine, THOUGHT + wrong) is (method == "json_mode")
    assert not obeys(engine, f"{THOUGHT}It rains.")


@pytest.mark.parametrize("kind", KINDS)
def test_a_form_is_readable_while_it_is_streamed(ask: Answer, kind: str) -> None:
    with served(FORM) as (url, _):
        parts = ask("form_parts", kind, url, "json_schema")
    assert parts[-1] == ROME


@pytest.mark.parametrize(
    ("kind", "options", "reasoning"),
    [
        ("openai_responses", {}, None),  # it reads summaries, for which it has to ask
        ("openai_responses", {"reasoning": {"summary": "auto"}}, "Let me think."),
        (
            *("anthropic_messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
            "Let me think.",
        ),
        ("ollama_chat", {"reasoning": True}, "Let me think."),
    ],
)
def test_reasoning_is_apart(
    ask: Answer, kind: str, options: dict[str, Any], reasoning: str | None
) -> None:
    with served("Four.") as (url, _):
        assert ask("blocks", kind, url, options) == [["reasoning", reasoning], ["text", None]]


def test_texts_are_embedded(ask: Answer) -> None:
    with serving(ScriptedEngine(answer_anything)) as url:
        for one, many, asynchronous in ask("embedded", url):
            assert (len(one), len(many), len(many[0])) == (4, 2, 4)
            assert asynchronous == many
