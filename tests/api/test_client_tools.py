"""Tools that Anthropic defines and clients run: the model is shown a schema, and calls them."""

from __future__ import annotations

import inspect
import json
import typing
from typing import Any

import anthropic
import httpx
import jsonschema
from anthropic.types import beta as beta_types
from qwen35_server import THOUGHT, prompt_text, says, serving_qwen

from call_texts import write_calls
from cases import cases
from pippin.api.requests.tools import client_tool

USER = {"role": "user", "content": "List the files."}
TOOLS = [
    {"type": "bash_20250124", "name": "bash", "cache_control": {"type": "ephemeral"}},
    {
        "type": "text_editor_20250728",
        "name": "str_replace_based_edit_tool",
        "max_characters": 10_000,
    },
    {"type": "memory_20250818", "name": "memory"},
]


def call(name: str, **arguments: Any) -> str:
    return THOUGHT + write_calls("qwen3_coder", [(name, arguments)])


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "qwen", "max_tokens": 50, "messages": [USER], **fields}
    return httpx.post(f"{url}/v1/messages", json=body)


def test_the_official_client_gets_calls_of_its_own_tools_and_sends_results() -> None:
    with (
        serving_qwen(says(call("bash", command="ls")), says(f"{THOUGHT}Done.")) as (url, engine),
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        options: Any = {"model": "qwen", "max_tokens": 50, "tools": TOOLS}
        reply = client.messages.create(messages=[USER], **options)
        block = reply.content[-1]
        assert (block.type, block.name, block.input) == ("tool_use", "bash", {"command": "ls"})
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "a.py"}
        turns = [USER, {"role": "assistant", "content": reply.content}]
        reply = client.messages.create(
            messages=[*turns, {"role": "user", "content": [result]}], **options
        )
    assert reply.content[-1].text == "Done."
    shown = prompt_text(engine, 0)
    assert all(f'"name": "{tool["name"]}"' in shown for tool in TOOLS)
    assert '"undo_edit"' not in shown
    assert "a.py" in prompt_text(engine, 1)


def test_a_call_that_is_required_obeys_the_schema_and_nothing_is_reported() -> None:
    with serving_qwen(says(call("memory", command="view", path="/memories"))) as (url, engine):
        reply = ask(url, tools=TOOLS, tool_choice={"type": "tool", "name": "memory"})
    assert "x-pippin-ignored" not in reply.headers
    assert reply.json()["content"][-1]["input"] == {"command": "view", "path": "/memories"}
    grammar = engine.submits[0].params.ebnf
    assert grammar is not None
    assert "rename" in grammar
    assert "restart" not in grammar


def test_those_that_anthropic_runs_are_left_out() -> None:
    others = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "bash_code_execution_20250825", "name": "b"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
    ]
    with serving_qwen(says(f"{THOUGHT}Hi.")) as (url, engine):
        reply = ask(url, tools=[*others, TOOLS[0]])
    kinds = [f"tools[{i}] ({tool['type']})" for i, tool in enumerate(others)]
    assert reply.headers["x-pippin-ignored"] == ", ".join(kinds)
    assert '"name": "bash"' in prompt_text(engine)
    assert "computer" not in prompt_text(engine)


@cases(
    ("type", "known"),
    [
        *(("bash_20241022", True), ("bash_20991231", True), ("text_editor_20250124", True)),
        *(("memory_20250818", True), ("memory_20200101", False), ("bash", False)),
        *(("bash_2025", False), ("Bash_20250124", False), (f"{'a' * 9999}_20250124", False)),
    ],
)
def test_types_are_known_by_their_kind_and_date(type: str, known: bool) -> None:
    assert (client_tool(type) is not None) == known


def test_older_editors_undo_and_insert_what_is_new() -> None:
    old, new = (client_tool(f"text_editor_{date}") for date in ("20250124", "20250728"))
    assert old is not None
    assert new is not None
    assert "undo_edit" in old["parameters"]["properties"]["command"]["enum"]
    assert "insert_text" not in old["parameters"]["properties"]
    assert "insert_text" in new["parameters"]["properties"]


def test_the_memory_tools_commands_are_those_of_the_official_types() -> None:
    known = client_tool("memory_20250818")
    assert known is not None
    schema = known["parameters"]
    commands = {
        name: type_
        for name, type_ in inspect.getmembers(beta_types, inspect.isclass)
        if name.startswith("BetaMemoryTool20250818") and name.endswith("Command")
    }
    names = set()
    for type_ in commands.values():
        (name,) = typing.get_args(type_.model_fields["command"].annotation)
        names.add(name)
        assert type_.model_fields.keys() <= schema["properties"].keys()
        values = {"insert_line": 0, "view_range": [1, 2]}
        given = {key: values.get(key, "a") for key in type_.model_fields} | {"command": name}
        type_.model_validate(given)
        jsonschema.validate(given, schema)
    assert names == set(schema["properties"]["command"]["enum"])


def test_a_name_is_needed_and_two_tools_do_not_share_one() -> None:
    with serving_qwen(says("")) as (url, _):
        assert "tools[0].name" in ask(url, tools=[{"type": "bash_20250124"}]).text
        assert "two tools" in json.dumps(ask(url, tools=[TOOLS[0], TOOLS[0]]).json())
