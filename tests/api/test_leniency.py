"""What cannot change a reply is ignored and reported; a text takes the place of pictures.

In every dialect, unless --strict-fields or --images refuse is set.
"""

from __future__ import annotations

import base64
import logging
from typing import Any

import httpx
import pytest
from scripted_engine import MODEL, TEXT, ScriptedEngine, say, serving

from cases import cases
from pippin.api.dialects.chat_completions import parse_chat
from pippin.api.dialects.messages import parse_message_request
from pippin.api.dialects.responses import parse_responses_request
from pippin.api.http.answers import IGNORED_HEADER
from pippin.api.job import prepare_chat
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import HEADER_CHARS, Leniency
from pippin.api.requests.neutral_request import ChatRequest
from pippin.api.response_store import ResponseStores
from pippin.config import LimitsConfig, ServerConfig
from pippin.errors import RequestError, UnsupportedField

USER = {"role": "user", "content": "Hi."}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PNG_DATA = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
PNG_URL = f"data:image/png;base64,{PNG_DATA}"


def rules(**options: bool) -> RequestRules:
    return RequestRules(MODEL, TEXT.defaults, LimitsConfig(), **options)


def chat(fields: dict[str, Any], **options: bool) -> ChatRequest:
    return parse_chat({"model": "stories", "messages": [USER]} | fields, rules(**options))


def responses(fields: dict[str, Any], **options: bool) -> ChatRequest:
    body = {"model": "stories", "input": "Hi."} | fields
    return parse_responses_request(body, rules(**options, stores=ResponseStores(10, 10_000)))


def messages(fields: dict[str, Any], **options: bool) -> ChatRequest:
    body = {"model": "stories", "messages": [USER], "max_tokens": 9} | fields
    return parse_message_request(body, rules(**options))


REPORTED = [
    (chat, {"store": True, "service_tier": "flex", "verbosity": "low"}),
    (chat, {"keep_alive": "5m", "num_ctx": 4096, "skip_special_tokens": False}),
    (chat, {"provider": {"order": ["a"]}, "prediction": {"type": "content", "content": "x"}}),
    (responses, {"truncation": "auto", "service_tier": "priority", "max_tool_calls": 3}),
    (messages, {"container": "c", "service_tier": "x", "mcp_servers": [{"url": "http://x"}]}),
]


@pytest.mark.parametrize(("read", "fields"), REPORTED)
def test_what_cannot_change_a_reply_is_ignored_and_reported(read: Any, fields: Any) -> None:
    assert set(read(fields).leniency.header().split(", ")) == set(fields)
    with pytest.raises(UnsupportedField, match="--strict-fields") as info:
        read(fields, strict_fields=True)
    assert info.value.param in fields


def test_neutral_values_are_not_reported() -> None:
    fields = {"store": False, "service_tier": "auto", "verbosity": "medium", "keep_alive": None}
    assert chat(fields, strict_fields=True).leniency.header() == ""


VENDORS_TOOLS = [
    (chat, {"tools": [FUNCTION, {"type": "web_search"}]}, "tools[1] (web_search)"),
    (
        responses,
        {"tools": [{"type": "mcp", "server_label": "x"}, {"type": "function", "name": "f"}]},
        "tools[0] (mcp)",
    ),
    (
        messages,
        {
            "tools": [
                {"type": "web_search_20250305", "name": "w"},
                {"name": "f", "input_schema": {}},
            ]
        },
        "tools[0] (web_search_20250305)",
    ),
]


@pytest.mark.parametrize(("read", "fields", "reported"), VENDORS_TOOLS)
def test_tools_that_only_a_vendor_runs_are_left_out(read: Any, fields: Any, reported: str) -> None:
    request = read(fields)
    assert [tool["function"]["name"] for tool in request.tool_use.tools] == ["f"]
    assert request.leniency.header() == reported
    with pytest.raises(UnsupportedField, match="runs no tools"):
        read(fields, strict_fields=True)


def test_a_call_of_a_tool_that_was_left_out_cannot_be_required() -> None:
    search = {"tools": [{"type": "web_search"}]}
    with pytest.raises(RequestError, match="tools is empty"):
        chat(search | {"tool_choice": "required"})
    with pytest.raises(RequestError, match="web_search"):
        responses(search | {"tool_choice": {"type": "web_search"}})


def test_unknown_fields_of_a_replayed_message_are_ignored() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}", "x": 1}, "extra_content": {}}
    replayed = {"role": "assistant", "content": "Yes.", "provider_specific_fields": {"a": 1}}
    replayed |= {"reasoning_details": [1], "audio": {"id": "a"}, "tool_calls": [call]}
    request = chat({"messages": [USER, replayed, replayed | {"role": "assistant"}]})
    assert request.messages[1]["content"] == "Yes."
    assert request.leniency.header() == (
        "messages[].provider_specific_fields, messages[].reasoning_details, messages[].audio, "
        "messages[].tool_calls[].extra_content, messages[].tool_calls[].function.x"
    )


def test_items_and_blocks_of_other_servers_tools_are_ignored() -> None:
    search = {"type": "web_search_call", "id": "w", "status": "completed", "action": {}}
    request = responses({"input": [USER | {"extra": 1}, search]})
    assert [message["content"] for message in request.messages] == ["Hi."]
    assert request.leniency.header() == "input[].extra, input[].type (web_search_call)"
    with pytest.raises(RequestError, match="no item"):
        responses({"input": [search]})
    used = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    reply = {"role": "assistant", "content": [used, {"type": "text", "text": "It is."}]}
    request = messages({"messages": [USER, reply, USER]})
    assert request.messages[1] == {"role": "assistant", "content": "It is."}
    assert "server_tool_use" in request.leniency.header()


def test_other_servers_names_of_our_fields_are_honoured() -> None:
    params = chat({"repeat_penalty": 1.5, "guided_json": {"type": "null"}}).options.params
    assert (params.repetition_penalty, params.json_schema) == (1.5, '{"type": "null"}')
    structured = {"structured_outputs": {"choice": ["a+b", "c d"]}}
    assert chat(structured).options.params.regex == r"a\x2bb|c\x20d"
    assert chat({"structured_outputs": {"regex": "[ab]"}}).options.params.regex == "[ab]"
    with pytest.raises(RequestError, match="repeat_penalty are the same"):
        chat({"repeat_penalty": 1.5, "repetition_penalty": 1.2})


@cases(
    ("fields", "effort"),
    [
        ({"enable_thinking": False}, "none"),
        ({"enable_thinking": True}, "medium"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"thinking": False}, "none"),
        ({"thinking": {"type": "auto"}}, None),
        ({"reasoning": {"effort": "high"}}, "high"),
        ({"reasoning": {"enabled": False}}, "none"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "low"),
    ],
)
def test_other_servers_switches_of_reasoning_are_ours(fields: Any, effort: str | None) -> None:
    assert chat(fields).reasoning_effort == effort


@pytest.mark.parametrize(
    ("read", "fields", "reported"),
    [
        (chat, {"reasoning_effort": "high"}, "reasoning_effort (high)"),
        (responses, {"reasoning": {"effort": "low"}}, "reasoning.effort (low)"),
        (messages, {"output_config": {"effort": "high"}}, "output_config.effort (high)"),
    ],
)
def test_an_effort_without_a_switch_is_ignored(read: Any, fields: Any, reported: str) -> None:
    assert prepare_chat(read(fields), TEXT, MODEL).leniency.header() == reported
    with pytest.raises(UnsupportedField, match="no switch"):
        prepare_chat(read(fields, strict_fields=True), TEXT, MODEL)


IMAGES = [
    (chat, "messages", {"type": "image_url", "image_url": {"url": PNG_URL}}),
    (responses, "input", {"type": "input_image", "image_url": PNG_URL}),
    (
        messages,
        "messages",
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": PNG_DATA},
        },
    ),
]


@pytest.mark.parametrize(("read", "field", "part"), IMAGES)
def test_a_picture_has_a_text_in_its_place(read: Any, field: str, part: Any) -> None:
    fields = {field: [{"role": "user", "content": [part]}]}
    request = read(fields)
    assert request.messages[-1]["content"] == "[image: PNG omitted]"
    assert request.leniency.header() == f"{field}[].content[] ({part['type']})"
    with pytest.raises(UnsupportedField, match="--images refuse"):
        read(fields, refuses_images=True)


def _of_ollama(stream: bool) -> dict[str, Any]:
    message = {"role": "user", "content": "Look.", "images": [PNG_DATA]}
    return {"messages": [message], "stream": stream}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "part", "place"),
    [
        ("/v1/chat/completions", "messages", IMAGES[0][2], "messages[].content[] (image_url)"),
        ("/v1/responses", "input", IMAGES[1][2], "input[].content[] (input_image)"),
        ("/v1/messages", "messages", IMAGES[2][2], "messages[].content[] (image)"),
        ("/api/chat", "messages", None, "messages[].images (image)"),
    ],
)
def test_the_reply_itself_lists_pictures_that_were_omitted(
    path: str, field: str, part: Any, place: str, stream: bool
) -> None:
    asked = {"model": "stories", "stream": stream, "max_tokens": 9}
    sent = {field: [{"role": "user", "content": [part]}]}
    if path == "/api/chat":
        asked, sent = {"model": "stories"}, _of_ollama(stream)
    elif path == "/v1/responses":
        del asked["max_tokens"]
    with serving(ScriptedEngine(say("I see."), say("Hi."))) as url:
        reply = httpx.post(url + path, json=asked | sent)
        assert reply.status_code == 200, reply.text
        assert f'"omitted":["{place}"]' in reply.text
        plain = asked | {field: [USER]} | ({"stream": stream})
        assert "omitted" not in httpx.post(url + path, json=plain).text


def test_a_picture_in_a_tools_result_has_a_text_in_its_place() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [IMAGES[2][2]]}
    request = messages({"messages": [USER, {"role": "user", "content": [result]}]})
    assert request.messages[-1]["content"] == "[image: PNG omitted]"
    output = {"type": "function_call_output", "call_id": "1", "output": [IMAGES[1][2]]}
    assert responses({"input": [USER, output]}).messages[-1]["content"].startswith("[image: PNG")
    result = {"role": "tool", "tool_call_id": "1", "content": [IMAGES[0][2]]}
    assert chat({"messages": [USER, result]}).messages[-1]["content"].startswith("[image: PNG")


def document(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **fields}


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


def file(name: str, data: str) -> dict[str, Any]:
    return {"type": "file", "file": {"filename": name, "file_data": data}}


PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "Plain."}
BLOCKS = [{"type": "text", "text": "Found."}]
FOUND = {"type": "search_result", "source": "http://s", "title": "S", "content": BLOCKS}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
NOTE = f"data:text/plain;base64,{base64.b64encode(b'A note.').decode()}"


@cases(
    ("part", "text"),
    [
        (image({"url": "http://a/b.png"}), "[image omitted: http://a/b.png]"),
        (image("http://a/" + "b" * 500), f"[image omitted: http://a/{'b' * 190}…]"),
        (image({"url": "data:image/heic;base64,AAAA"}), "[image: HEIC omitted]"),
        (image({"url": "data:image/png;base64,é"}), "[image: PNG omitted]"),
        ({"type": "image"}, "[image omitted]"),
        (SOUND, "[audio omitted]"),
        (file("a.pdf", "JVBERi0="), "[file omitted: a.pdf]"),
        (file("n.txt", NOTE), "n.txt\nA note."),
        (file("n.txt", "data:text/plain;base64,/w=="), "[file omitted: n.txt]"),
        ({"type": "input_file", "filename": "a.pdf", "file_id": "f-1"}, "[file omitted: a.pdf]"),
        ({"type": "input_file", "file_id": "f-1"}, "[file omitted: f-1]"),
        (document(PDF, title="Report"), "[document omitted: Report]"),
        (document(PLAIN, title="T"), "T\nPlain."),
        (document({"type": "content", "content": BLOCKS}), "Found."),
        (FOUND, "S\nhttp://s\nFound."),
        ({"type": "refusal", "refusal": "No."}, "No."),
    ],
)
def test_files_become_their_text_or_their_name(part: dict[str, Any], text: str) -> None:
    request = chat({"messages": [{"role": "user", "content": [part]}]})
    assert request.messages[0]["content"] == text


@pytest.mark.parametrize("kind", ["texts", "Image", "a b", "x" * 65, 7, None])
def test_a_part_of_no_type_is_refused(kind: Any) -> None:
    with pytest.raises(RequestError) as info:
        chat({"messages": [{"role": "user", "content": [{"type": kind, "text": "a"}]}]})
    assert info.value.param == "messages[0].content[0].type"


def test_the_header_is_bounded_and_plain() -> None:
    leniency = Leniency()
    for number in range(100_000):
        leniency.ignore(f"messages[].{number}é\r\nx: y, z" + "x" * 1000, "why")
    header = leniency.header()
    assert len(header) <= HEADER_CHARS
    assert header.isascii()
    assert header.isprintable()
    assert header.endswith(", ...")
    assert header.startswith("messages[].0???x??y??z")


def test_the_response_and_the_log_say_what_was_ignored(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"model": "stories", "messages": [USER | {"a\nb": 1}], "store": True}
    with serving(ScriptedEngine(say("Hi."), say("Hi."), say("Hi."))) as url:
        caplog.set_level(logging.DEBUG, "pippin.requests")
        for more in ({}, {"stream": True}):
            reply = httpx.post(f"{url}/v1/chat/completions", json=asked | more)
            assert reply.headers[IGNORED_HEADER] == "store, messages[].a?b"
        plain = httpx.post(
            f"{url}/v1/chat/completions", json=asked | {"store": None, "messages": [USER]}
        )
        assert IGNORED_HEADER not in plain.headers
        counted = {"model": "stories", "messages": [USER], "container": "c"}
        counts = httpx.post(f"{url}/v1/messages/count_tokens", json=counted)
        assert counts.headers[IGNORED_HEADER] == "container"
    assert "ignored store, messages[].a?b" in caplog.text


def test_options_of_the_server_refuse_instead() -> None:
    config = ServerConfig(strict_fields=True, images="refuse")
    with serving(ScriptedEngine(), config) as url:
        for more in ({"store": True}, {"messages": [{"role": "user", "content": [IMAGES[0][2]]}]}):
            asked = {"model": "stories", "messages": [USER]} | more
            assert httpx.post(f"{url}/v1/chat/completions", json=asked).status_code == 400


@pytest.mark.parametrize(
    ("field", "off", "on"),
    [("typical_p", 1.0, 0.5), ("mirostat", 0, 2), ("top_a", 0, 0.1), ("dry_multiplier", 0.0, 0.8)],
)
def test_a_sampler_that_there_is_not_may_be_switched_off(field: str, off: Any, on: Any) -> None:
    with serving(ScriptedEngine(say("Hi."))) as url:
        accepted, refused = (
            httpx.post(
                f"{url}/v1/completions", json={"model": "stories", "prompt": "a", field: value}
            )
            for value in (off, on)
        )
    assert (accepted.status_code, refused.status_code) == (200, 400)
    assert "x-pippin-ignored" not in accepted.headers
    assert refused.json()["error"]["param"] == field
