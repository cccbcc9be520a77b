"""OpenAI's tools that clients run: shown as functions, called as items of their own types."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import openai
import pytest
from openai.types.responses import (
    ApplyPatchToolParam,
    FunctionShellToolParam,
    ResponseOutputItem,
)
from openai.types.responses.response_input_item_param import (
    ApplyPatchCallOutput,
    LocalShellCallOutput,
    ShellCallOutput,
)
from openai.types.responses.tool_param import LocalShell
from pydantic import TypeAdapter
from qwen35_server import THOUGHT, openai_client, prompt_text, says

from call_texts import write_calls
from cases import cases
from pippin.api.requests.tools import CALLS, SHELL_TOOLS, call_fields

ARGUMENTS: dict[str, dict[str, Any]] = {
    "local_shell": {"command": ["bash", "-lc", "ls -l"], "timeout_ms": 5_000},
    "shell": {"commands": ["ls", "pwd"]},
    "apply_patch": {"type": "update_file", "path": "a.py", "diff": "@@\n-x = 1\n+x = 2"},
}
ACTIONS = {
    "local_shell": {"type": "exec", **ARGUMENTS["local_shell"], "env": {}},
    "shell": {**ARGUMENTS["shell"], "timeout_ms": None, "max_output_length": None},
    "apply_patch": ARGUMENTS["apply_patch"],
}
# Each as the SDK's types have it, but for the id of the call; and what the model is shown.
OUTPUTS: dict[str, tuple[dict[str, Any], type, str]] = {
    "local_shell": ({"output": "a.py"}, LocalShellCallOutput, "a.py"),
    "shell": (
        {
            "output": [
                {"stdout": "a.py\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
                {"stdout": "", "stderr": "no", "outcome": {"type": "timeout"}},
            ]
        },
        ShellCallOutput,
        "a.py\n[exit code 0]\nno\n[timeout]",
    ),
    "apply_patch": (
        {"status": "failed", "output": "no such line"},
        ApplyPatchCallOutput,
        "failed: no such line",
    ),
}
NAMES = pytest.mark.parametrize("name", SHELL_TOOLS)


def call_of(name: str, arguments: dict[str, Any] | None = None) -> str:
    return write_calls("qwen3_coder", [(name, arguments or ARGUMENTS[name])])


def asked(name: str, **fields: Any) -> dict[str, Any]:
    return {"model": "qwen", "input": "List the files.", "tools": [{"type": name}]} | fields


def action_of(item: Any) -> Any:
    return item.model_dump(mode="json", exclude_unset=True)[SHELL_TOOLS[CALLS[item.type]].field]


@NAMES
def test_a_call_is_an_item_of_its_type_whole_and_streamed(name: str) -> None:
    with openai_client(says(THOUGHT + call_of(name))) as (client, engine):
        whole = client.responses.create(**asked(name))
        with client.responses.stream(**asked(name)) as stream:
            events = list(stream)
            streamed = stream.get_final_response()
    assert f'"name": "{name}"' in prompt_text(engine)
    for response in (whole, streamed):
        call = response.output[-1]
        TypeAdapter(ResponseOutputItem).validate_python(call.model_dump(), strict=False)
        assert (call.type, call.status) == (f"{name}_call", "completed")
        assert action_of(call) == ACTIONS[name]
        assert call.call_id.startswith("call_")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done")
    commands = [event.command for event in events if event.type.endswith("call_command.done")]
    assert commands == (ARGUMENTS["shell"]["commands"] if name == "shell" else [])


@NAMES
@pytest.mark.parametrize("stored", [True, False])
def test_the_output_of_a_call_is_shown_to_the_model(name: str, stored: bool) -> None:
    fields, kind, shown = OUTPUTS[name]
    with openai_client(says(THOUGHT + call_of(name)), says("Done.")) as (client, engine):
        first = client.responses.create(**asked(name))
        call = first.output[-1]
        assert {*fields, "type"} <= kind.__annotations__.keys()
        id_field = "id" if name == "local_shell" else "call_id"
        output = {"type": f"{name}_call_output", id_field: call.call_id, **fields}
        before = {"previous_response_id": first.id} if stored else {}
        history = [] if stored else [{"role": "user", "content": "List."}, *first.output]
        reply = client.responses.with_raw_response.create(
            **asked(name, input=[*history, output], **before)
        )
    assert call_of(name) in prompt_text(engine)
    assert f"<tool_response>\n{shown}\n</tool_response>" in prompt_text(engine)
    assert "x-pippin-ignored" not in reply.headers


@NAMES
def test_a_forced_call_follows_the_tools_schema(name: str, obeys: Any) -> None:
    choice = {"type": name}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    with openai_client(says(THOUGHT + call_of(name))) as (client, engine):
        for each in (choice, allowed):
            client.responses.create(**asked(name, tool_choice=each))
            assert obeys(engine, THOUGHT + call_of(name))
            assert not obeys(engine, THOUGHT + call_of(name, {"cmd": "ls"}))
            assert not obeys(engine, f"{THOUGHT}Done.")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("max_tokens", "status"), [(None, "completed"), (32, "incomplete")])
def test_other_arguments_are_a_call_of_a_function(
    stream: bool, max_tokens: int | None, status: str
) -> None:
    wrong = {"cmd": "list all files of this directory and of those below it"}
    with openai_client(says(THOUGHT + call_of("shell", wrong))) as (client, _):
        sent = asked("shell", max_output_tokens=max_tokens, stream=stream)
        response = client.responses.create(**sent)
        if stream:
            response = list(response)[-1].response
    call = response.output[-1]
    assert (call.type, call.name, call.status) == ("function_call", "shell", status)
    assert call.arguments.startswith('{"cmd": ')


def test_a_function_of_the_same_name_stays_a_function() -> None:
    tool = {"type": "function", "name": "shell", "parameters": {"type": "object"}}
    with openai_client(says(THOUGHT + call_of("shell"))) as (client, _):
        call = client.responses.create(**asked("shell", tools=[tool])).output[-1]
    assert (call.type, json.loads(call.arguments)) == ("function_call", ARGUMENTS["shell"])


@pytest.mark.parametrize("place", ["container_auto", "container_reference"])
def test_a_shell_in_a_container_of_openai_is_left_out(place: str) -> None:
    tool = {"type": "shell", "environment": {"type": place}}
    with openai_client(says("Done.")) as (client, engine):
        reply = client.responses.with_raw_response.create(**asked("shell", tools=[tool]))
        local = {"type": "shell", "environment": {"type": "local", "skills": []}}
        client.responses.create(**asked("shell", tools=[local]))
    assert reply.headers["x-pippin-ignored"] == f"tools[0].environment.type ({place})"
    assert '"name": "shell"' not in prompt_text(engine, 0)
    assert '"name": "shell"' in prompt_text(engine)


@cases(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "apply_patch"}}, "tool_choice"),
        ({"tool_choice": {"type": ["shell"]}}, "tool_choice.type"),
        ({"input": [{"type": "shell_call", "call_id": "a"}]}, "input[0].action"),
        ({"input": [{"type": ["shell_call"], "call_id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "shell_call_output", "output": ""}]}, "input[0].call_id"),
        (
            {"input": [{"type": "shell_call_output", "call_id": "a", "output": 3}]},
            "input[0].output",
        ),
        ({"tools": [{"type": "shell"}, {"type": "shell"}]}, "tools"),
        ({"tools": [{"type": "shell", "environment": 3}]}, "tools[0].environment"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with openai_client(says("")) as (client, _), pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**asked("shell", **fields))
    assert caught.value.param == param


@cases(
    ("name", "arguments"),
    [
        ("shell", "["),
        ("shell", "[" * 100_000),
        ("shell", '{"commands": "ls"}'),
        ("shell", '{"commands": [1]}'),
        ("local_shell", "{}"),
        ("apply_patch", '{"type": "create_file", "path": "a"}'),
        ("apply_patch", '{"type": "move_file", "path": "a", "diff": ""}'),
    ],
)
def test_arguments_of_another_shape_are_no_action(name: str, arguments: str) -> None:
    assert call_fields(name, arguments) is None


def test_a_deleted_file_has_no_diff() -> None:
    fields = call_fields("apply_patch", '{"type": "delete_file", "path": "a"}')
    assert fields is not None
    assert fields["operation"] == {"type": "delete_file", "path": "a"}


def test_these_are_the_sdks_tools_that_clients_run() -> None:
    tools = (LocalShell, FunctionShellToolParam, ApplyPatchToolParam)
    kinds = [get_args(get_type_hints(tool)["type"]) for tool in tools]
    assert kinds == [(name,) for name in SHELL_TOOLS]
