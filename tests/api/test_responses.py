"""OpenAI's Responses API, with the official client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses.input_token_count_params import InputTokenCountParams
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
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
    serving_qwen,
)
from scripted_engine import fail

from cases import cases
from pippin.api.dialects.responses import INPUT_TOKENS, RESPONSES
from pippin.api.requests.fields import SAMPLING, SERVING, STRUCTURE
from pippin.api.requests.shared_fields import GENERATION, REASONING

QUESTION = "What is the weather?"
TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}
OTHERS = {*SAMPLING, *STRUCTURE, *SERVING, *GENERATION, *REASONING}
OTHERS |= {"reasoning_effort", "chat_template_kwargs"}
CODEX = {"client_metadata"}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "qwen", "input": QUESTION, "tools": [TOOL]} | fields


def whole(client: Any, **fields: Any) -> Any:
    return client.responses.create(**asked(**fields))


def streamed(client: Any, **fields: Any) -> Any:
    """The same, put together by the client's own helper."""
    with client.responses.stream(**asked(**fields)) as stream:
        return stream.get_final_response()


either_way = pytest.mark.parametrize("reply", [whole, streamed])


def test_every_documented_field_is_honoured_or_refused() -> None:
    documented = set(ResponseCreateParamsStreaming.__annotations__)
    for base in ResponseCreateParamsStreaming.__orig_bases__:
        documented |= set(getattr(base, "__annotations__", ()))
    assert documented == RESPONSES.fields.keys() - (OTHERS - documented) - CODEX


def test_every_documented_field_of_a_count_is_known() -> None:
    assert InputTokenCountParams.__annotations__.keys() <= INPUT_TOKENS.fields.keys()


def test_tokens_are_counted_as_they_are_sent() -> None:
    with openai_client(says(f"{THOUGHT}It rains.")) as (client, engine):
        first = whole(client, instructions="Be brief.")
        counted = client.responses.input_tokens.count(**asked(instructions="Be brief."))
        later = asked(input="And now?", previous_response_id=first.id)
        whole(client, **later)
        continued = client.responses.input_tokens.count(**later)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == engine.submits[0].prompt_len
    assert continued.input_tokens == engine.submits[1].prompt_len


@either_way
def test_reasoning_text_and_calls_are_items(reply: Any) -> None:
    with openai_client(says(f"{THOUGHT}I look.\n\n{TWO_CALLS}")) as (client, _):
        response = reply(client)
    reasoning, message, first, second = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Let me think.")
    assert (message.type, response.output_text) == ("message", "I look.")
    assert (first.type, first.name) == ("function_call", "get_weather")
    assert json.loads(first.arguments) == ARGUMENTS
    assert first.call_id != second.call_id
    assert response.status == "completed"
    usage = response.usage
    assert usage.input_tokens_details.cached_tokens == 3
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_events_are_numbered_and_every_item_is_added_and_done() -> None:
    with openai_client(says(f"{THOUGHT}I look.\n\n{CALL}")) as (client, _):
        events = list(whole(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == 3
    assert kinds.count("response.output_item.done") == 3
    assert kinds.count("response.function_call_arguments.delta") > 3


def test_a_response_has_every_field_of_open_responses_in_each_frame() -> None:
    sent = {"presence_penalty": 0.5, "prompt_cache_key": "a", "safety_identifier": "b"}
    with openai_client(says(f"{THOUGHT}I look.")) as (client, _):
        replies = [
            whole(client, extra_body=sent).to_dict(),
            *(
                e.response.to_dict()
                for e in whole(client, stream=True, extra_body=sent)
                if hasattr(e, "response")
            ),
        ]
        raw = httpx.post(f"{client.base_url}responses", json=asked(stream=True)).text
    assert len(replies) == 4
    for reply in replies:
        assert (
            reply.items()
            >= {
                **sent,
                "frequency_penalty": 0.0,
                "top_logprobs": 0,
                "max_tool_calls": None,
                "background": False,
                "service_tier": "default",
            }.items()
        )
        assert (reply["completed_at"] is not None) == (reply["status"] == "completed")
    assert raw.endswith("data: [DONE]\n\n")


def last_of_stream(client: Any, **fields: Any) -> Any:
    return list(whole(client, stream=True, **fields))[-1].response


@pytest.mark.parametrize("reply", [whole, last_of_stream])
def test_a_cut_reply_is_incomplete(reply: Any) -> None:
    with openai_client(says(f"{THOUGHT}It rains.")) as (client, _):
        response = reply(client, max_output_tokens=6)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output][-1] == "incomplete"


@pytest.mark.parametrize("reply", [whole, last_of_stream])
def test_a_cut_call_is_an_incomplete_item(reply: Any) -> None:
    with openai_client(says(THOUGHT + CALL)) as (client, _):
        response = reply(client, max_output_tokens=28)
    call = response.output[-1]
    assert (response.status, call.type, call.status) == (
        "incomplete",
        "function_call",
        "incomplete",
    )
    assert call.arguments.startswith('{"city": "Tokyo')


def test_a_conversation_is_sent_back_as_it_came() -> None:
    with openai_client(says(f"{THOUGHT}I look.\n\n{CALL}"), says("Rain.")) as (client, engine):
        first = whole(client, store=False, include=["reasoning.encrypted_content"])
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        user = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
        whole(client, input=[user, *first.output, result])
    prompt = prompt_text(engine)
    assert prompt.startswith(prompt_text(engine, 0)), "the prefix cache holds the first turn"
    assert f"Let me think.\n</think>\n\nI look.\n\n{CALL}" in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


def with_summary(client: Any, **fields: Any) -> Any:
    return whole(client, reasoning={"summary": "auto"}, **fields)


@either_way
@pytest.mark.parametrize("field", ["summary", "generate_summary"])
def test_reasoning_is_its_own_summary_for_clients_that_ask_for_one(reply: Any, field: str) -> None:
    with openai_client(says(f"{THOUGHT}It rains.")) as (client, _):
        response = reply(client, reasoning={field: "detailed"})
    item = response.output[0]
    assert [(part.type, part.text) for part in item.summary] == [("summary_text", "Let me think.")]
    assert item.content is None
    assert response.reasoning.summary == "detailed"


def test_a_summary_is_streamed_as_it_arrives() -> None:
    with openai_client(says(f"{THOUGHT}It rains.")) as (client, _):
        events = list(with_summary(client, stream=True))
    kind = "response.reasoning_summary"
    deltas = [event for event in events if event.type == f"{kind}_text.delta"]
    (done,) = [event for event in events if event.type == f"{kind}_text.done"]
    added, part = (
        next(event for event in events if event.type == f"{kind}_part.{what}")
        for what in ("added", "done")
    )
    assert len(deltas) > 2
    assert (
        "".join(event.delta for event in deltas) == done.text == part.part.text == "Let me think."
    )
    assert (added.part.text, added.part.type) == ("", "summary_text")
    assert {event.summary_index for event in (*deltas, done, added, part)} == {0}
    assert {event.item_id for event in (*deltas, done, added, part)} == {done.item_id}
    assert not [event for event in events if "reasoning_text" in event.type]


@either_way
@pytest.mark.parametrize("form", [{}, {"reasoning": {"summary": "auto"}}])
@pytest.mark.parametrize("kept", ["content", "summary", "encrypted_content"])
def test_reasoning_is_read_from_what_a_client_sends_back_of_it(
    reply: Any, form: dict[str, Any], kept: str
) -> None:
    include = ["reasoning.encrypted_content"]
    with openai_client(says(THOUGHT + CALL), says("Rain.")) as (client, engine):
        first = reply(client, store=False, include=include, **form)
        reasoning, call = first.output
        item = reasoning.model_dump(exclude_none=True)
        if not item.get(kept):
            return  # it has no text there
        sent = {"type": "reasoning", "id": item["id"], "summary": [], kept: item[kept]}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        whole(client, input=[{"role": "user", "content": QUESTION}, sent, call, result])
    assert prompt_text(engine).startswith(prompt_text(engine, 0) + THOUGHT + CALL)


@pytest.mark.parametrize("blob", ["gAAAA-of-another-server", "pippin-reasoning-!", 7])
def test_what_another_server_encrypted_is_not_shown(blob: Any) -> None:
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": blob}
    sent = [{"role": "user", "content": QUESTION}, item, {"role": "assistant", "content": "Yes."}]
    with openai_client(says("Rain.")) as (client, engine):
        if blob == 7:
            with pytest.raises(openai.BadRequestError, match="encrypted_content is 7"):
                whole(client, input=[*sent, {"role": "user", "content": "Go on."}])
            return
        whole(client, input=[*sent, {"role": "user", "content": "Go on."}])
    assert blob not in prompt_text(engine)


def test_structured_output_is_parsed(obeys: Any) -> None:
    class Weather(BaseModel):
        city: str
        days: int

    with openai_client(says(THOUGHT + json.dumps(ARGUMENTS))) as (client, engine):
        response = client.responses.parse(model="qwen", input=QUESTION, text_format=Weather)
    assert response.output_parsed == Weather(city="Tokyo", days=3)
    assert obeys(engine, THOUGHT + json.dumps(ARGUMENTS))
    assert not obeys(engine, f"{THOUGHT}{' ' * 20}{json.dumps(ARGUMENTS)}"), (
        "it could go on for ever"
    )
    assert not obeys(engine, f"{THOUGHT}It rains.")


def test_a_named_call_is_kept_by_a_grammar(obeys: Any) -> None:
    with openai_client(says(THOUGHT + CALL)) as (client, engine):
        whole(client, tool_choice={"type": "function", "name": "get_weather"})
    assert obeys(engine, THOUGHT + CALL)
    assert not obeys(engine, THOUGHT + TWO_CALLS), "it is called once"
    assert not obeys(engine, f"{THOUGHT}It rains.")


def test_effort_switches_the_templates_reasoning() -> None:
    with openai_client(says("It rains.")) as (client, engine):
        whole(client, reasoning={"effort": "none"})
    assert prompt_text(engine).endswith("</think>\n\n")


@cases(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"tools": [{"type": "functions"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "function_cal", "id": "x"}]}, "input[0].type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": [{"role": "user", "content": [{"type": "texts"}]}]}, None),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str | None) -> None:
    with openai_client(says("")) as (client, _), pytest.raises(openai.BadRequestError) as caught:
        whole(client, **fields)
    assert caught.value.param == (param or "input[0].content[0].type")


def test_an_error_in_a_stream_ends_it() -> None:
    with serving_qwen(fail("the device failed", after="x")) as (url, _):
        reply = httpx.post(f"{url}/v1/responses", json=asked(stream=True))
    events = [event.split("\n") for event in reply.text.strip().split("\n\n")]
    assert events.pop() == ["data: [DONE]"]
    assert [name for name, _ in events[-2:]] == ["event: error", "event: response.failed"]
    assert "the device failed" in events[-1][1]
