"""How much one request may hold: each bound is a 400 that names it, and long values are not echoed.

What a body at the bounds costs is measured by `tools/fuzz_bodies.py`.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from scripted_engine import ScriptedEngine, say, serving

from cases import cases
from pippin.api.dialects import responses
from pippin.api.dialects.responses import messages_of, read_items
from pippin.api.http import read_body
from pippin.api.http.read_body import NUM_THREADS
from pippin.api.requests import body as bounds
from pippin.api.requests import body as json_scan
from pippin.api.requests.body import Body, check_json_size, shown
from pippin.api.requests.sampling_fields import check_sampling
from pippin.api.response_store import ResponseStore, StoredTurn
from pippin.errors import MAX_MESSAGE_CHARS, RequestError, cut
from pippin.text.chat_template import MessageShape
from pippin.types import SamplingParams
from processes import run_python

CHAT = {"model": "stories", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
COMPLETION = {"model": "stories", "prompt": "Hi.", "max_tokens": 1}
RESPONSE = {"model": "stories", "input": "Hi.", "max_output_tokens": 1}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"model": "stories", "input": "Hi."},
    "/v1/rerank": {"query": "Hi.", "documents": ["Hi."]},
    "/v1/score": {"text_1": "Hi.", "text_2": "Hi."},
    "/api/chat": {"model": "stories", "messages": [{"role": "user", "content": "Hi."}]},
    "/api/generate": {"model": "stories", "prompt": "Hi."},
    "/api/embed": {"model": "stories", "input": "Hi."},
    "/api/embeddings": {"model": "stories", "prompt": "Hi."},
    "/api/show": {"model": "stories"},
    "/api/pull": {"model": "stories"},
    "/tokenize": {"prompt": "Hi."},
    "/detokenize": {"tokens": [1]},
}
FUNCTION = {"type": "function", "function": {"name": "f"}}
LONG = "x" * 1_000_000
USER = {"role": "user", "content": ""}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(ScriptedEngine(say("Hi."))) as url, httpx.Client(base_url=url) as client:
        yield client


def refusal(client: httpx.Client, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(path, json=BODIES[path] | fields)
    assert reply.status_code in (400, 404), reply.text[:300]
    assert len(reply.content) < 2 * MAX_MESSAGE_CHARS
    error = reply.json()["error"]
    return {"message": error} if isinstance(error, str) else error  # Ollama's shape


def tools(number: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{i}", **fields}} for i in range(number)]


TOO_MANY = [
    ("/v1/chat/completions", {"messages": [USER] * 10_001}, "messages", "10,000"),
    ("/v1/messages", {"messages": [USER] * 10_001}, "messages", "10,000"),
    ("/v1/responses", {"input": [USER] * 10_001}, "input", "10,000"),
    ("/api/chat", {"messages": [USER] * 10_001}, "messages", "10,000"),
    ("/api/chat", {"tools": [FUNCTION] * 1025}, "tools", "1,024"),
    ("/tokenize", {"prompt": ["a"] * 10_001}, "prompt", "10,000"),
    ("/detokenize", {"tokens": [[1]] * 10_001}, "tokens", "10,000"),
    ("/v1/chat/completions", {"tools": tools(1025)}, "tools", "1,024"),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}}] * 1025}, "tools", "1,024"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f"}] * 1025}, "tools", "1,024"),
    ("/v1/completions", {"stop_token_ids": [1] * 1025}, "stop_token_ids", "1,024"),
    ("/v1/completions", {"stop": ["x" * 1025]}, "stop", "1,024"),
    ("/v1/messages", {"stop_sequences": ["x" * 1025]}, "stop_sequences", "1,024"),
    ("/v1/chat/completions", {"user": "x" * 1025}, "user", "1,024"),
    ("/v1/responses", {"safety_identifier": "x" * 1025}, "safety_identifier", "1,024"),
    ("/v1/responses", {"previous_response_id": LONG}, "previous_response_id", "1,024"),
    ("/v1/responses", {"metadata": {str(i): "" for i in range(65)}}, "metadata", "64"),
    ("/v1/responses", {"metadata": {"x" * 1025: ""}}, "metadata", "1,024"),
    ("/v1/responses", {"metadata": {"a": "x" * 16_385}}, "metadata.a", "16,384"),
    ("/v1/messages", {"metadata": {"user_id": "x" * 16_385}}, "metadata.user_id", "16,384"),
]


@pytest.mark.parametrize(("path", "fields", "param", "most"), TOO_MANY)
def test_more_than_a_bound_is_refused_by_name(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str, most: str
) -> None:
    error = refusal(client, path, fields)
    assert most in error["message"]
    assert param in error["message"]
    assert error.get("param", param) == param  # Anthropic's shape has none


def test_tools_of_namespaces_count_together(client: httpx.Client) -> None:
    inner = [{"type": "function", "name": f"f{i}"} for i in range(600)]
    spaces = [{"type": "namespace", "name": name, "tools": inner} for name in ("a", "b")]
    error = refusal(client, "/v1/responses", {"tools": spaces})
    assert "1,200 tools; at most 1,024" in error["message"]


def test_two_tools_of_one_name_are_refused(client: httpx.Client) -> None:
    error = refusal(client, "/v1/chat/completions", {"tools": [FUNCTION, FUNCTION]})
    assert error["message"] == 'two tools have the name "f"'


def test_stop_ids_are_kept_once_each() -> None:
    params = check_sampling(SamplingParams(stop_token_ids=(5, 4, 5)), vocab_size=10)
    assert params.stop_token_ids == (5, 4)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("depth", [129, 500, 990, 5_000, 1_000_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")])
def test_deep_json_is_refused_anywhere_in_a_body(
    client: httpx.Client, path: str, depth: int, brackets: tuple[str, str]
) -> None:
    value = brackets[0] * depth + "1" + brackets[1] * depth
    body = json.dumps(BODIES[path])[:-1] + f', "metadata": {value}}}'
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "levels deep; at most 128" in reply.text or "objects and arrays" in reply.text


DEEP_PLACES = [
    ("/v1/chat/completions", lambda deep: {"tools": tools(1, parameters=deep)}),
    ("/v1/chat/completions", lambda deep: {"chat_template_kwargs": {"a": deep}}),
    ("/v1/chat/completions", lambda deep: {"response_format": deep}),
    ("/v1/completions", lambda deep: {"json_schema": deep}),
    ("/tokenize", lambda deep: {"prompt": None, "messages": [deep]}),
    (
        "/v1/messages",
        lambda deep: {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": deep}],
                },
                CHAT["messages"][0],  # type: ignore[index]
            ]
        },
    ),
]


@pytest.mark.parametrize("depth", [50, 110, 125])
@pytest.mark.parametrize(("path", "fields"), DEEP_PLACES)
def test_json_as_deep_as_is_allowed_is_no_mistake_of_the_server(
    client: httpx.Client, path: str, fields: Any, depth: int
) -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        deep = {"type": "object", "properties": {"a": deep}} if depth < 60 else {"a": deep}
    reply = client.post(path, json=BODIES[path] | fields(deep))
    assert reply.status_code in (200, 400), reply.text


@pytest.mark.parametrize("depth", [129, 5_000])
def test_deep_arguments_in_a_history_are_refused(client: httpx.Client, depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    error = refusal(client, "/v1/chat/completions", {"messages": messages})
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    error = refusal(client, "/v1/responses", {"input": [USER, item]})
    assert error["param"] == "input[1].arguments"


def test_half_of_a_pair_in_arguments_is_no_mistake_of_the_server() -> None:
    shape = MessageShape(text_arguments=False, one_text_beside_calls=False)
    call = {"function": {"name": "f", "arguments": r'{"a\udfff": "\uD800", "b": "\ud83d\ude00"}'}}
    [message] = shape.apply([{"role": "assistant", "tool_calls": [call]}])
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert arguments == {"a\ufffd": "\ufffd", "b": "\U0001f600"}


@cases(
    ("text", "what"),
    [
        ("[" + "[]," * 100_000 + "1]", "100,001 objects and arrays; at most 100,000"),
        ("[" + "{}," * 100_000 + "1]", "100,001 objects and arrays; at most 100,000"),
        ("[" + '"",' * 500_001 + "1]", "500,001 strings; at most 500,000"),
        ("[" + "1," * 1_500_000 + "1]", "1,500,001 values; at most 1,500,000"),
        ("[" + "5e-324," * 20_001 + "1]", "20,001 numbers that are no integers; at most 20,000"),
        ("[" + "5E1," * 20_001 + "1]", "20,001 numbers that are no integers; at most 20,000"),
        ("[" + "0.5," * 20_001 + "1]", "20,001 numbers that are no integers; at most 20,000"),
        ("[" * 129 + "]" * 129, "129 levels deep; at most 128"),
        ("9" * 401, "a number of 401 digits; at most 400"),
        ('"' + "1" * 2_000_000 + '",' + "0." + "3" * 4000, "a number of 4,000 digits; at most 400"),
        ("[" + f"{10**18}," * 20_001 + "1]", "20,001 numbers of more than 18 digits; at most 20,0"),
    ],
)
def test_json_is_measured_before_it_is_decoded(text: str, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        check_json_size(text.encode(), "it")


@pytest.mark.parametrize("text", ["{[" * 300_000, '\\"[{' * 200_000, "\\" * 999_999, '"' * 501])
def test_structure_inside_of_strings_does_not_count(text: str) -> None:
    check_json_size(json.dumps({"a": text, "b": "\\", "c": ["]"] * 200}).encode(), "it")


def test_text_is_measured_alike_wherever_it_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a string and behind an escape, in a number and between brackets."""
    text = rb'[["a\\\\","\\\"[[[",{"b":1' + b"2" * 402 + rb',"c\"":[-0.5e-3]}],"\\",7'
    deep = text.replace(b"2", b"") + b"[" * 400
    for nbytes in range(1, len(text) + 1):
        monkeypatch.setattr(json_scan, "_BLOCK_BYTES", nbytes)
        with pytest.raises(RequestError, match=r"a number of 40[123] digits; at most 400"):
            check_json_size(text, "it")
        with pytest.raises(RequestError, match=r"nested \d+ levels deep; at most 128"):
            check_json_size(deep, "it")
        check_json_size(deep.replace(b"[" * 400, b"1"), "it")


def test_words_and_integers_are_no_floats() -> None:
    check_json_size(b"[" + b"true,false,12," * 30_000 + b"1]", "it")


def test_brackets_behind_an_escaped_quote_count() -> None:
    deep = "[" * 200 + "]" * 200
    check_json_size(json.dumps({"a": f'\\" {deep}'}).encode(), "it")
    with pytest.raises(RequestError, match="201 levels"):
        check_json_size(b'{"a": "\\\\\\\\", "b": ' + deep.encode() + b"}", "it")


def test_a_long_name_that_is_ignored_is_not_echoed_whole(client: httpx.Client) -> None:
    reply = client.post("/api/chat", json=BODIES["/api/chat"] | {LONG: 1})
    assert reply.status_code == 200
    assert 0 < len(reply.headers["x-pippin-ignored"]) < 200


@pytest.mark.parametrize("path", [path for path in BODIES if not path.startswith("/api/")])
def test_a_long_name_is_neither_compared_nor_echoed_whole(client: httpx.Client, path: str) -> None:
    error = refusal(client, path, {LONG: 1})
    assert "is not a field of this request" in error["message"]
    assert len(error["message"]) < 200
    assert len(error.get("param", "")) < 200


LONG_VALUES = [
    ("/v1/completions", {"model": LONG}),
    ("/v1/completions", {"temperature": LONG}),
    ("/v1/completions", {"temperature": [LONG]}),
    ("/v1/completions", {"logit_bias": {LONG: 1}}),
    ("/v1/completions", {"response_format": {"type": LONG}}),
    ("/v1/chat/completions", {"tool_choice": LONG}),
    ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": LONG}}}),
    ("/v1/chat/completions", {"messages": [{"role": LONG}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/chat/completions", {"chat_template_kwargs": {"messages": LONG}}),
    ("/v1/chat/completions", {"reasoning_effort": LONG}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": LONG}]}),
    ("/v1/responses", {"input": [{"type": LONG}]}),
    ("/v1/responses", {"previous_response_id": "x" * 1000}),
    ("/v1/responses", {"include": [LONG]}),
    ("/v1/responses", {"store": LONG}),
    ("/v1/messages", {"thinking": {"type": LONG}}),
    ("/v1/embeddings", {"encoding_format": LONG}),
]


@pytest.mark.parametrize(("path", "fields"), LONG_VALUES)
def test_a_long_value_is_not_echoed_whole(
    client: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    assert len(refusal(client, path, fields)["message"]) < 500


def test_what_is_shown_of_a_value_is_cut() -> None:
    assert len(shown(LONG)) == len(shown([LONG])) == len(cut(LONG)) == 64
    assert shown("short") == '"short"'
    assert len(RequestError(LONG).message) == MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG], "echo": True}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 1_000_000, "echo": True}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": ["a", LONG]}, "input"),
        ("/v1/rerank", {"query": "a", "documents": ["a", LONG]}, "documents"),
        ("/v1/score", {"text_1": LONG, "text_2": "a"}, "text_1"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"prompt": "\U0001f600" * 125_001}, "prompt"),  # bytes count
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    client: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    error = refusal(client, path, fields)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "maximum context length" in error["message"]


def test_a_conversation_is_measured_before_it_is_rendered(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin.text.chat_template.ChatTemplate.encode", None)
    call = {"function": {"name": "f", "arguments": json.dumps({"a": LONG})}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, USER]
    error = refusal(client, "/v1/chat/completions", {"messages": messages})
    assert error["code"] == "context_length_exceeded"


def test_tokens_may_be_counted_of_a_text_that_does_not_fit(client: httpx.Client) -> None:
    text = "word " * 20_000
    assert client.post("/tokenize", json={"prompt": text}).json()["count"] > 8192
    body = CHAT | {"messages": [{"role": "user", "content": text}]}
    assert client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] > 8192


def test_of_many_texts_none_is_encoded_behind_one_that_is_too_long(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []

    def encode(self: Any, text: str, **_: Any) -> list[int]:
        encoded.append(text)
        return [1] * (9000 if text == "long" else 1)

    monkeypatch.setattr("pippin.text.tokenizer.Tokenizer.encode", encode)
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        encoded.clear()
        refusal(client, path, {field: ["a", "long", "b", "c"]})
        assert encoded == ["a", "long"]


def stored_turn(num_items: int, text: str = "a") -> ResponseStore:
    store = ResponseStore(8, 10_000_000)
    given = [
        {"type": "message", "role": "user", "id": f"i{i}", "content": text}
        for i in range(num_items)
    ]
    store.put({"id": "r", "output": []}, StoredTurn.of(given, [], None))
    return store


def references(*ids: str) -> Body:
    return Body({"input": [{"type": "item_reference", "id": id} for id in ids]})


def test_references_decode_a_stored_turn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, decoded = stored_turn(1000), []
    decode = msgspec.json.decode
    monkeypatch.setattr(msgspec.json, "decode", lambda part: (decoded.append(1), decode(part))[1])
    body = references(*(f"i{i}" for i in range(1000)), "i7")
    found = read_items(body, store.items, 1_000_000)
    assert [item["id"] for item in found[-2:]] == ["i999", "i7"]
    assert len(decoded) == 2  # what went in, what came out


def test_references_to_more_than_a_body_may_hold_are_refused() -> None:
    store = stored_turn(1, "x" * 10_000)
    find = store.items
    assert len(read_items(references(*["i0"] * 9), find, 100_000)) == 9
    with pytest.raises(RequestError, match=r"at most 100,000 .*--max-body-bytes"):
        read_items(references(*["i0"] * 10), find, 100_000)


def test_a_conversation_with_all_that_it_goes_on_from_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(responses, "MAX_MESSAGES", 10)
    item = {"type": "message", "role": "user", "content": "a"}
    assert len(messages_of(Body({}), [item] * 5, [item] * 5)) == 10
    with pytest.raises(RequestError, match="at most 10"):
        messages_of(Body({}), [item] * 6, [item] * 5)


def test_texts_of_one_turn_are_joined() -> None:
    said = {"type": "message", "role": "assistant", "content": "ab"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "cd"}]}
    [turn] = messages_of(Body({}), [], [thought, said] * 4000)
    assert turn["content"] == "ab" * 4000
    assert turn["reasoning_content"] == "cd" * 4000


def test_user_messages_in_a_row_are_joined_where_a_template_wants_one() -> None:
    shape = MessageShape(text_arguments=True, one_text_beside_calls=False, one_user=True)
    messages = [{"role": "user", "content": str(i)} for i in range(3)]
    reply = {"role": "assistant", "content": "x"}
    assert shape.apply([*messages, reply, messages[0]]) == [
        {"role": "user", "content": "0\n\n1\n\n2"},
        reply,
        messages[0],
    ]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_glibc_has_an_arena_for_each_thread_and_takes_its_thresholds() -> None:
    """With fewer, threads that tokenize wait for each other at every allocation."""
    code = "from pippin.api.http import read_body as f; print(f.return_freed_memory())"
    assert run_python(code) == "True"
    assert read_body._SETTINGS[read_body._ARENA_MAX] == 1 + NUM_THREADS


def test_the_documentation_lists_every_bound() -> None:
    document = (
        Path(__file__).parents[2].joinpath("docs/operations/limits.md").read_text(encoding="utf-8")
    )
    section = document.partition("## Fixed bounds")[2]
    for name, value in vars(bounds).items():
        if name.startswith("MAX_"):
            assert f" {value:,} " in section, name
