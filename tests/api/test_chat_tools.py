"""Tools and reasoning in chat completions, with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel
from qwen35_server import (
    ARGUMENTS,
    CALL,
    THOUGHT,
    TWO_CALLS,
    WEATHER,
    openai_client,
    prompt_text,
    says,
)

from cases import cases

USER = {"role": "user", "content": "What is the weather?"}
FUNCTION = {"name": "get_weather", "description": "Looks.", "parameters": WEATHER}
TOOL = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": FUNCTION | {"strict": True}}


def ask(client: Any, *messages: Any, **fields: Any) -> Any:
    fields = {"tools": [TOOL]} | fields
    return client.chat.completions.create(model="qwen", messages=messages or [USER], **fields)


def whole(client: Any, **fields: Any) -> Any:
    return ask(client, **fields).choices[0]


def streamed(client: Any, **fields: Any) -> Any:
    """The same, put together by the client's own helper."""
    state: Any = ChatCompletionStreamState()
    for chunk in ask(client, stream=True, **fields):
        state.handle_chunk(chunk)
    return state.get_final_completion().choices[0]


either_way = pytest.mark.parametrize("reply", [whole, streamed])


@either_way
def test_a_call_is_parsed_and_nothing_of_it_is_content(reply: Any) -> None:
    with openai_client(says(f"{THOUGHT}I look.\n\n{CALL}")) as (client, _):
        choice = reply(client)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == "Let me think."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == ARGUMENTS


@either_way
def test_several_calls_have_ids_of_their_own(reply: Any) -> None:
    with openai_client(says(THOUGHT + TWO_CALLS)) as (client, _):
        calls = reply(client).message.tool_calls
    assert [json.loads(c.function.arguments)["city"] for c in calls] == ["Tokyo", "Rome"]
    assert len({call.id for call in calls}) == 2


@either_way
def test_a_reply_without_calls_stops(reply: Any) -> None:
    with openai_client(says(f"{THOUGHT}It rains.")) as (client, _):
        choice = reply(client)
    assert (choice.finish_reason, choice.message.content) == ("stop", "It rains.")
    assert not choice.message.tool_calls


@either_way
def test_a_malformed_call_is_content(reply: Any) -> None:
    text = "<tool_call>\nget weather please\n</tool_call>"
    with openai_client(says(THOUGHT + text)) as (client, _):
        choice = reply(client)
    assert (choice.finish_reason, choice.message.content) == ("stop", text)


@either_way
def test_a_cut_call_says_length(reply: Any) -> None:
    with openai_client(says(THOUGHT + CALL)) as (client, _):
        try:
            choice = reply(client, max_tokens=26)
        except openai.LengthFinishReasonError as error:
            choice = error.completion.choices[0]
    assert choice.finish_reason == "length"
    assert not choice.message.content, "markup is no content"
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.dumps(ARGUMENTS).startswith(call.function.arguments)


def test_arguments_are_streamed_while_they_come() -> None:
    with openai_client(says(THOUGHT + CALL)) as (client, _):
        deltas = [c.choices[0].delta for c in ask(client, stream=True)]
    parts = [d.tool_calls[0].function.arguments for d in deltas if d.tool_calls]
    assert len(parts) > 3
    assert json.loads("".join(parts)) == ARGUMENTS


def test_usage_counts_reasoning() -> None:
    with openai_client(says(f"{THOUGHT}It rains.")) as (client, _):
        usage = ask(client).usage
    reasoning = usage.completion_tokens_details.reasoning_tokens
    assert 0 < reasoning < usage.completion_tokens


def test_a_turn_with_results_repeats_the_call_as_it_was() -> None:
    with openai_client(says(THOUGHT + CALL), says(f"{THOUGHT}Rain.")) as (client, engine):
        message = ask(client).choices[0].message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
        ask(client, USER, message, result)
    assert CALL in prompt_text(engine)
    assert "<tool_response>\nrain" in prompt_text(engine)


@pytest.mark.parametrize(
    ("choice", "may", "may_not"),
    [
        ("required", CALL, "It rains."),
        ({"type": "function", "function": {"name": "get_weather"}}, CALL, "It rains."),
        ("none", "It rains.", CALL),
    ],
)
def test_a_choice_is_kept_by_a_grammar(choice: Any, may: str, may_not: str, obeys: Any) -> None:
    with openai_client(says(THOUGHT + CALL)) as (client, engine):
        ask(client, tool_choice=choice)
    assert obeys(engine, THOUGHT + may)
    assert not obeys(engine, THOUGHT + may_not)


def test_auto_is_free() -> None:
    with openai_client(says(THOUGHT + CALL)) as (client, engine):
        ask(client)
    assert engine.submits[0].params.grammar is None


def test_strict_arguments_are_kept_by_a_grammar(obeys: Any) -> None:
    with openai_client(says(THOUGHT + CALL)) as (client, engine):
        ask(client, tools=[STRICT])
    assert obeys(engine, f"{THOUGHT}It rains.")
    assert obeys(engine, f"{THOUGHT}I look.\n\n{TWO_CALLS}")
    assert not obeys(engine, THOUGHT + CALL.replace("3", "three"))
    assert not obeys(engine, THOUGHT + CALL.replace("=city", "=town"))


def test_one_call_alone_is_kept_by_a_grammar(obeys: Any) -> None:
    with openai_client(says(THOUGHT + CALL)) as (client, engine):
        ask(client, parallel_tool_calls=False)
    assert obeys(engine, THOUGHT + CALL)
    assert not obeys(engine, THOUGHT + TWO_CALLS)


def test_a_schema_is_kept_behind_the_reasoning(obeys: Any) -> None:
    class Weather(BaseModel):
        city: str
        days: int

    text = json.dumps(ARGUMENTS)
    with openai_client(says(THOUGHT + text)) as (client, engine):
        reply = client.chat.completions.parse(
            model="qwen", messages=[USER], response_format=Weather
        )
    assert reply.choices[0].message.parsed == Weather(city="Tokyo", days=3)
    assert obeys(engine, THOUGHT + text)
    assert not obeys(engine, f"{THOUGHT}It rains.")


def test_a_schema_of_content_leaves_a_required_call_as_it_is(obeys: Any) -> None:
    """Instructor sends both."""
    schema = {"name": "weather", "schema": {"type": "object", "required": ["city"]}}
    form = {"type": "json_schema", "json_schema": schema}
    with openai_client(says(THOUGHT + CALL)) as (client, engine):
        for tool_choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            ask(client, response_format=form, tool_choice=tool_choice)
            assert obeys(engine, THOUGHT + CALL)
            assert not obeys(engine, f'{THOUGHT}{{"city": "Rome"}}')


def test_effort_switches_the_templates_reasoning() -> None:
    with openai_client(says("It rains.")) as (client, engine):
        choice = whole(client, reasoning_effort="none")
        assert prompt_text(engine).endswith("<think>\n\n</think>\n\n")
        whole(client, reasoning_effort="high")
        assert prompt_text(engine).endswith("<think>\n")
    assert choice.message.content == "It rains."


@cases(
    ("fields", "param"),
    [
        ({"tools": [{"type": "functions"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"tool_choice": "required", "extra_body": {"regex": "a"}}, "regex"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with openai_client(says("")) as (client, _), pytest.raises(openai.BadRequestError) as caught:
        ask(client, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("keyword", [{"not": {}}, {"type": ["string", "integer"]}])
def test_strict_is_refused_where_it_cannot_be_kept(keyword: Any) -> None:
    parameters = {"type": "object", "properties": {"a": keyword}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    with (
        openai_client(says("")) as (client, _),
        pytest.raises(openai.BadRequestError, match="strict cannot be enforced for f") as caught,
    ):
        ask(client, tools=[tool])
    assert caught.value.param == "tools"
