"""OpenAI's tools that clients run (shells, patches) as functions, and their calls back.

A client names such a tool by its type and sends no schema: OpenAI's models know it. Other models
are shown a function of that name. Knows no dialect's events.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from pippin.api.requests.body import Body

Schema = dict[str, Any]
CONTAINERS = ("container_auto", "container_reference")  # of OpenAI's, in which a shell can run
_STRING: Schema = {"type": "string"}
_STRINGS: Schema = {"type": "array", "items": _STRING}
_MILLISECONDS: Schema = {"type": "integer", "minimum": 1, "description": "Time limit, in ms"}


class _LocalShellAction(msgspec.Struct, omit_defaults=True):
    command: list[str]
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None
    env: dict[str, str] | None = None

    def wire(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {"type": "exec", **fields, "env": self.env or {}}


class _ShellAction(msgspec.Struct):
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None

    def wire(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


class _PatchOperation(msgspec.Struct, omit_defaults=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None

    def __post_init__(self) -> None:
        if (self.diff is None) is not (self.type == "delete_file"):
            raise ValueError("all operations but delete_file have a diff")

    def wire(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ShellTool:
    """One of them; its type is the name of the function."""

    prefix: str  # of the ids of its calls
    field: str  # of a call: what is to be run
    action: type[_LocalShellAction | _ShellAction | _PatchOperation]
    description: str
    parameters: Schema


def _object(required: tuple[str, ...], **properties: Schema) -> Schema:
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": list(required), **closed}


SHELL_TOOLS: Mapping[str, ShellTool] = {
    "local_shell": ShellTool(
        "lsh",
        "action",
        _LocalShellAction,
        "Run a command on the user's computer and return its output",
        _object(
            ("command",),
            command={**_STRINGS, "description": 'The command in words: ["bash", "-lc", "ls"]'},
            timeout_ms=_MILLISECONDS,
            user={**_STRING, "description": "The user to run it as"},
            working_directory=_STRING,
            env={"type": "object", "additionalProperties": _STRING},
        ),
    ),
    "shell": ShellTool(
        "sh",
        "action",
        _ShellAction,
        "Run shell commands, each in a shell of its own, and return their outputs",
        _object(
            ("commands",),
            commands=_STRINGS,
            timeout_ms=_MILLISECONDS,
            max_output_length={
                "type": "integer",
                "minimum": 1,
                "description": "Characters to return of each command's output",
            },
        ),
    ),
    "apply_patch": ShellTool(
        "apc",
        "operation",
        _PatchOperation,
        "Create, update or delete one file",
        _object(
            ("type", "path"),
            type={**_STRING, "enum": ["create_file", "update_file", "delete_file"]},
            path={**_STRING, "description": "Path of the file"},
            diff={
                **_STRING,
                "description": "For create_file: the file's lines, each behind a +. For "
                "update_file: hunks, each a line @@ and then lines that begin with a space "
                "(as it is), - (removed) or + (added). None for delete_file",
            },
        ),
    ),
}
CALLS = {f"{name}_call": name for name in SHELL_TOOLS}
OUTPUTS = {f"{name}_call_output": name for name in SHELL_TOOLS}


def shell_function(name: str) -> dict[str, Any]:
    tool = SHELL_TOOLS[name]
    function = {"name": name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def call_fields(name: str, arguments: str) -> dict[str, Any] | None:
    """What is to be run, of a call's item; None: the model wrote other arguments."""
    tool = SHELL_TOOLS[name]
    try:
        action = msgspec.json.decode(arguments, type=tool.action, strict=False)
    except msgspec.DecodeError:
        return None
    return {"type": f"{name}_call", tool.field: action.wire()}


def arguments_of_call(item: Body) -> str:
    """A past call's, as the function's, in the order in which the model is shown them."""
    tool = SHELL_TOOLS[CALLS[item.required_string("type")]]
    inner = item.required_object(tool.field)
    kept = {name: inner.get(name) for name in tool.parameters["properties"] if inner.get(name)}
    return json.dumps(kept, ensure_ascii=False)


def output_text(item: Body) -> str:
    """What a model is shown of a past call's output."""
    if item.get("type") == "apply_patch_call_output":
        return ": ".join(filter(None, (item.string("status", ""), item.string("output", ""))))
    if isinstance(item.get("output"), str):
        return item.required_string("output")
    return "\n".join(map(_command_output, item.objects("output", "a string or a list")))


def _command_output(part: Body) -> str:
    outcome = part.object("outcome") or Body({})
    ended = "timeout"
    if outcome.get("type") != "timeout":
        ended = f"exit code {outcome.get('exit_code', 'unknown')}"
    texts = (part.string("stdout", ""), part.string("stderr", ""))
    return "\n".join([*(text.rstrip("\n") for text in texts if text), f"[{ended}]"])
