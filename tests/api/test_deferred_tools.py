"""Claude Code 2.1.327 loads tools by its `ToolSearch`, as in the requests that it sent here."""

from __future__ import annotations

import json
from typing import Any

import httpx
from qwen35_server import THOUGHT, prompt_text, says, serving_qwen

from call_texts import write_calls

SCHEMA = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}
SEARCH = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": {"type": "object"}}
EMPTY = {"type": "object", "properties": {}}
PLACEHOLDER = {"name": "DeferredToolPlaceholder", "input_schema": EMPTY, "defer_loading": True}
FETCH = {"name": "WebFetch", "description": "Été.", "input_schema": SCHEMA, "defer_loading": True}
FUNCTION = {"name": "WebFetch", "description": "Été.", "parameters": SCHEMA}
DESCRIBED = f"""<functions>
<function>{json.dumps(FUNCTION, ensure_ascii=False)}</function>
<function>{{"name": "ToolSearch"}}</function>
</functions>"""
USER = {"role": "user", "content": "Read example.com."}
SEARCHED = {"type": "tool_use", "id": "toolu_0", "name": "ToolSearch", "input": {"query": "web"}}
REFERENCES = [{"type": "tool_reference", "tool_name": name} for name in ("WebFetch", "ToolSearch")]
FOUND = {"type": "tool_result", "tool_use_id": "toolu_0", "content": REFERENCES}
SESSION = [
    USER,
    {"role": "assistant", "content": [SEARCHED]},
    {"role": "user", "content": [{**FOUND, "cache_control": {"type": "ephemeral"}}]},
]


def ask(url: str, messages: list[Any], *tools: Any, **fields: Any) -> httpx.Response:
    body = {"model": "qwen", "max_tokens": 50, "messages": messages, "tools": tools, **fields}
    reply = httpx.post(f"{url}/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    return reply


def test_a_tool_that_was_found_is_described_in_the_result_and_can_be_called() -> None:
    call = write_calls("qwen3_coder", [("WebFetch", {"url": "https://example.com"})])
    with serving_qwen(says(f"{THOUGHT}Hi."), says(THOUGHT + call)) as (url, engine):
        first = ask(url, [USER], SEARCH, PLACEHOLDER)
        second = ask(url, SESSION, FETCH, SEARCH, PLACEHOLDER)
    assert second.json()["content"][-1]["name"] == "WebFetch"
    for reply in (first, second):
        assert "x-pippin-ignored" not in reply.headers
    before, after = prompt_text(engine, 0), prompt_text(engine, 1)
    assert after.startswith(before[: before.rindex("<|im_start|>assistant")])  # which is cached
    assert DESCRIBED in after
    assert "Placeholder" not in before + after


def test_a_deferred_tool_is_held_to_its_schema_once_it_was_found() -> None:
    choice = {"type": "tool", "name": "WebFetch"}
    with serving_qwen(says("{}")) as (url, engine):
        ask(url, SESSION, FETCH, SEARCH, tool_choice=choice)
        body = {"model": "qwen", "max_tokens": 5, "messages": [USER], "tools": [FETCH, SEARCH]}
        refused = httpx.post(f"{url}/v1/messages", json={**body, "tool_choice": choice})
    assert "WebFetch" in str(engine.submits[0].params.ebnf)
    assert refused.status_code == 400
    assert 'names \\"WebFetch\\", which is not in tools' in refused.text


def test_tools_are_listed_where_a_search_of_anthropics_servers_would_find_them() -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    with serving_qwen(says(f"{THOUGHT}Hi.")) as (url, engine):
        reply = ask(url, [USER], search, FETCH)
    assert reply.headers["x-pippin-ignored"] == "tools[0] (tool_search_tool_bm25_20251119)"
    assert '"name": "WebFetch"' in prompt_text(engine)


def test_a_tool_that_was_found_many_times_is_described_once() -> None:
    again = {**FOUND, "content": [REFERENCES[0]] * 100}
    messages = [*SESSION[:2], {"role": "user", "content": [FOUND, again]}]
    with serving_qwen(says(f"{THOUGHT}Hi.")) as (url, engine):
        ask(url, messages, FETCH, SEARCH)
    prompt = prompt_text(engine)
    assert prompt.count('"parameters": {"type": "object", "properties": {"url"') == 1
    assert prompt.count('<function>{"name": "WebFetch"}</function>') == 100
