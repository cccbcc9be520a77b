"""Anthropic's Messages API, with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from qwen35_server import (
    ARGUMENTS,
    CALL,
    THOUGHT,
    TWO_CALLS,
    WEATHER,
    prompt_text,
    says,
    serving_qwen,
)
from scripted_engine import Script, ScriptedEngine, fail

from pippin.api.dialects.messages import MESSAGES
from pippin.api.requests.fields import SAMPLING, SERVING
from pippin.api.requests.shared_fields import HINTS, SAMPLERS
from pippin.config import ServerConfig

USER = {"role": "user", "content": "What is the weather?"}
TOOL = {"name": "get_weather", "description": "Looks.", "input_schema": WEATHER}
OTHERS = {*SAMPLING, *SERVING, *HINTS, *SAMPLERS, "chat_template_kwargs"}
BETA = {"context_management", "mcp_servers", "compaction", "thread"}
BETA |= {"fallbacks", "fallback_credit_token", "billing_policy"}
HEADERS = {"workspace_id"}


@contextmanager
def client_of(
    *scripts: Script, config: ServerConfig | None = None, key: str = "none"
) -> Iterator[tuple[Any, ScriptedEngine]]:
    with (
        serving_qwen(*scripts, config=config) as (url, engine),
        anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client,
    ):
        yield client, engine


def asked(*messages: Any, **fields: Any) -> dict[str, Any]:
    base = {"model": "qwen", "max_tokens": 500, "messages": list(messages) or [USER]}
    return base | {"tools": [TOOL]} | fields


def whole(client: Any, *messages: Any, **fields: Any) -> Any:
    return client.messages.create(**asked(*messages, **fields))


def streamed(client: Any, *messages: Any, **fields: Any) -> Any:
    """The same, put together by the client's own helper."""
    with client.messages.stream(**asked(*messages, **fields)) as stream:
        return stream.get_final_message()


either_way = pytest.mark.parametrize("reply", [whole, streamed])


def test_every_documented_field_is_honoured_or_refused() -> None:
    documented = set(MessageCreateParamsStreaming.__annotations__)
    for base in MessageCreateParamsStreaming.__orig_bases__:
        documented |= set(getattr(base, "__annotations__", ()))
    assert documented - HEADERS == MESSAGES.fields.keys() - (OTHERS - documented) - BETA


@either_way
def test_thinking_text_and_tool_use_are_blocks(reply: Any) -> None:
    with client_of(says(f"{THOUGHT}I look.\n\n{TWO_CALLS}")) as (client, _):
        message = reply(client)
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me think.")
    assert (text.type, text.text) == ("text", "I look.")
    assert (first.type, first.name, first.input) == ("tool_use", "get_weather", ARGUMENTS)
    assert second.input == {"city": "Rome"}
    assert first.id != second.id
    assert message.stop_reason == "tool_use"
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.input_tokens > 3
    assert message.usage.output_tokens > 10


def test_a_cut_call_has_the_input_that_was_written() -> None:
    with client_of(says(THOUGHT + CALL)) as (client, _):
        message = whole(client, max_tokens=28)
    assert message.stop_reason == "max_tokens"
    call = message.content[-1]
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert call.input == {"city": "Tokyo"}


@either_way
def test_why_it_stopped(reply: Any) -> None:
    with client_of(says(f"{THOUGHT}It rains. And how.")) as (client, _):
        assert reply(client).stop_reason == "end_turn"
        assert reply(client, max_tokens=8).stop_reason == "max_tokens"
        stopped = reply(client, stop_sequences=["And"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "And")
    assert stopped.content[-1].text == "It rains. "


def test_a_turn_with_results_and_a_reminder() -> None:
    with client_of(says(THOUGHT + CALL), says(f"{THOUGHT}Rain.")) as (client, engine):
        first = whole(client, system="Be brief.")
        result = {
            "type": "tool_result",
            "tool_use_id": first.content[-1].id,
            "content": [{"type": "text", "text": "rain"}],
            "cache_control": {"type": "ephemeral"},
        }
        content = [result, {"type": "text", "text": "<system-reminder>Hurry.</system-reminder>"}]
        reply = {"role": "assistant", "content": first.content}
        whole(client, USER, reply, {"role": "user", "content": content}, system="Be brief.")
    prompt = prompt_text(engine)
    assert CALL in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt
    assert prompt.index("rain\n") < prompt.index("<system-reminder>")
    assert prompt.startswith(prompt_text(engine, 0)[:-20]), "the prefix cache holds the first turn"


def test_a_changing_line_of_billing_is_no_part_of_the_prompt() -> None:
    lines = ["x-anthropic-billing-header: cc_version=2; cch=abc;", "Be brief."]
    system = [{"type": "text", "text": line} for line in lines]
    with client_of(says("Hm.")) as (client, engine):
        whole(client, system=system)
    assert "billing" not in prompt_text(engine)
    assert "Be brief." in prompt_text(engine)


def test_tokens_are_counted_as_they_are_sent() -> None:
    with client_of(says("Hm.")) as (client, engine):
        whole(client)
        counted = client.messages.count_tokens(model="qwen", messages=[USER], tools=[TOOL])
    assert counted.input_tokens == engine.submits[0].prompt_len


def test_models_are_listed_in_anthropics_shape() -> None:
    with client_of(says("")) as (client, _):
        page = client.models.list()
        one = client.models.retrieve("qwen")
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.models.retrieve("claude")
    assert [model.id for model in page] == ["qwen"]
    assert (page.has_more, page.first_id, page.last_id) == (False, "qwen", "qwen")
    assert (one.type, one.display_name, one.created_at.timestamp()) == ("model", "qwen", 1)
    assert (one.lifecycle, one.max_input_tokens, one.max_tokens) == ("active", 65_536, 65_536)
    assert caught.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("choice", "may", "may_not"),
    [
        ({"type": "any"}, TWO_CALLS, "It rains."),
        ({"type": "tool", "name": "get_weather"}, CALL, "It rains."),
        ({"type": "any", "disable_parallel_tool_use": True}, CALL, TWO_CALLS),
        ({"type": "none"}, "It rains.", CALL),
    ],
)
def test_a_choice_is_kept_by_a_grammar(choice: Any, may: str, may_not: str, obeys: Any) -> None:
    with client_of(says(THOUGHT + CALL)) as (client, engine):
        whole(client, tool_choice=choice)
    assert obeys(engine, THOUGHT + may)
    assert not obeys(engine, THOUGHT + may_not)


def test_a_schema_is_kept(obeys: Any) -> None:
    config = {"format": {"type": "json_schema", "schema": WEATHER}}
    with client_of(says(THOUGHT + json.dumps(ARGUMENTS))) as (client, engine):
        whole(client, tools=[], extra_body={"output_config": config})
    assert obeys(engine, THOUGHT + json.dumps(ARGUMENTS))
    assert not obeys(engine, f"{THOUGHT}It rains.")


def test_thinking_is_switched_by_the_template() -> None:
    with client_of(says("It rains.")) as (client, engine):
        message = whole(client, thinking={"type": "disabled"})
        assert prompt_text(engine).endswith("</think>\n\n")
        whole(client, thinking={"type": "enabled", "budget_tokens": 1024})
        assert prompt_text(engine).endswith("<think>\n")
    assert message.content[0].text == "It rains."


def test_what_claude_code_sends_besides_is_understood() -> None:
    reminder = {"role": "system", "content": "Be brief."}
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    with client_of(says("It rains.")) as (client, engine):
        body = {"context_management": {"edits": edits}}
        whole(client, system="You help.", messages=[USER, reminder], extra_body=body)
    assert prompt_text(engine).count("<|im_start|>system") == 1
    assert "You help.\n\nBe brief.<|im_end|>" in prompt_text(engine)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"extra_body": {"temperature": 1.5}}, "temperature is 1.5"),
        ({"tools": [{"type": "function", "name": "bash"}]}, r"tools\[0\].type"),
        ({"messages": [{"role": "user", "content": []}]}, "at least one block"),
    ],
)
def test_what_is_wrong_is_said_in_anthropics_shape(fields: dict[str, Any], words: str) -> None:
    with (
        client_of(says("")) as (client, _),
        pytest.raises(anthropic.BadRequestError, match=words) as caught,
    ):
        whole(client, **fields)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_keys_come_as_x_api_key_and_refusals_too_have_that_shape() -> None:
    config = ServerConfig(api_key=("right",))
    with client_of(says("Hm."), config=config, key="right") as (client, _):
        assert whole(client).content
    with (
        client_of(says("Hm."), config=config, key="wrong") as (client, _),
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        whole(client)
    assert caught.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(("key", "status"), [("right", 200), ("wrong", 401), ("", 401)])
def test_a_key_alone_in_x_api_key(key: str, status: int) -> None:
    with serving_qwen(says("Hm."), config=ServerConfig(api_key=("right",))) as (url, _):
        reply = httpx.post(f"{url}/v1/messages", json=asked(), headers={"x-api-key": key})
    assert reply.status_code == status


def test_an_error_in_a_stream_is_an_event() -> None:
    with serving_qwen(fail("the device failed", after="x")) as (url, _):
        reply = httpx.post(f"{url}/v1/messages", json=asked(stream=True))
    name, data = reply.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == "the device failed"
