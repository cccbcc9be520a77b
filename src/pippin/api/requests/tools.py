"""Declared tools and how a reply may call them, for every dialect. Knows no format of calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pippin.api.requests.body import Body, shown
from pippin.api.requests.bounds import MAX_TOOLS, check_count
from pippin.api.requests.custom_tools import as_function, read_grammar
from pippin.api.requests.neutral_request import ToolUse
from pippin.decode.size.check_size import check_nesting_of
from pippin.errors import RequestError
from pippin.types import GrammarPart

OWN_KINDS = ("function", "custom", "namespace")
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


@dataclass(frozen=True)
class ToolChoice:
    """`tool_choice`: a mode, and the names of the tools to choose from."""

    mode: str = "auto"
    names: tuple[str, ...] | None = None  # None: any
    once: bool = False  # one call, and no more

    @classmethod
    def of(cls, name: str) -> ToolChoice:
        """The one to call: OpenAI promises one call of it."""
        return cls("required", (name,), once=True)


@dataclass(frozen=True)
class DeclaredTool:
    tool: dict[str, Any]
    custom: bool = False
    grammar: GrammarPart | None = None  # of a custom tool's input
    namespace: str | None = None
    is_shell: bool = False  # one of `shell_tools.py`
    deferred: bool = False  # described in the conversation, where it was found

    @property
    def name(self) -> str:
        return str(self.tool["function"]["name"])

    def within(self, namespace: str, description: str) -> DeclaredTool:
        """The tool in a namespace, whose name and description precede its own."""
        function = self.tool["function"]
        joined = "\n\n".join(filter(None, (description, function.get("description"))))
        name = full_name(namespace, self.name)
        function = {**function, "name": name, "description": joined}
        return replace(self, tool={**self.tool, "function": function}, namespace=namespace)


def full_name(namespace: str, name: str) -> str:
    return f"{namespace}.{name}"


def tool_bodies(body: Body) -> list[Body]:
    tools = body.objects("tools") if body.has("tools") else []
    check_count(tools, MAX_TOOLS, body.name("tools"), "tools")
    return tools


def is_left_out(tool: Body, kinds: tuple[str, ...]) -> bool:
    """Whether only its vendor's servers know or run it: then the model does not see it."""
    kind = tool.require("type")
    if kind in kinds:
        return False
    if kind in OWN_KINDS or not tool.is_foreign("type", OWN_KINDS):
        raise tool.unsupported("type", f"{' and '.join(kinds)} are supported")
    tool.leniency.ignore(tool.path, "this server runs no tools", kind)
    return True


def tool_use(body: Body, tools: Sequence[DeclaredTool], choice: ToolChoice) -> ToolUse:
    check_count(tools, MAX_TOOLS, "tools", "tools")  # with those of namespaces
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise RequestError(f"two tools have the name {shown(tool.name)}", param="tools")
        names.add(tool.name)
    for name in choice.names or ():
        if name not in names:
            raise body.error("tool_choice", f"names {shown(name)}, which is not in tools")
    if choice.mode == "required" and not tools:
        raise body.error("tool_choice", 'is "required", and tools is empty')
    return ToolUse(
        tools=tuple(tool.tool for tool in tools),
        forbidden=choice.mode == "none",
        required=choice.mode == "required",
        only=None if choice.names is None else frozenset(choice.names),
        parallel=body.boolean("parallel_tool_calls", True) and not choice.once,
        custom={tool.name: tool.grammar for tool in tools if tool.custom},
        namespaces=frozenset(tool.namespace for tool in tools if tool.namespace is not None),
        shells=frozenset(tool.name for tool in tools if tool.is_shell),
        deferred=frozenset(tool.name for tool in tools if tool.deferred),
    )


def function_tool(declared: Body, parameters_field: str) -> DeclaredTool:
    name = tool_name(declared)
    function: dict[str, Any] = {"name": name}
    if (description := declared.string("description", None)) is not None:
        function["description"] = description
    if declared.has(parameters_field):
        declared.required_object(parameters_field)
        schema = declared.get(parameters_field)
        check_nesting_of(schema, declared.name(parameters_field))
        function["parameters"] = schema
    if declared.boolean("strict", False):
        function["strict"] = True
    return DeclaredTool({"type": "function", "function": function})


def custom_tool(declared: Body, grammar_field: str | None = None) -> DeclaredTool:
    """`grammar_field`: where the format has its grammar, if not beside its type."""
    name, grammar = tool_name(declared), None
    if (format := declared.object("format")) is not None:
        format.require("type")
        if format.one_of("type", ("text", "grammar")) == "grammar":
            if grammar_field is not None:
                format.check_known({"type", grammar_field})
                format = format.required_object(grammar_field)
            format.check_known({"type", "syntax", "definition"})
            grammar = read_grammar(format)
    function = as_function(name, declared.string("description", None), grammar)
    return DeclaredTool(function, custom=True, grammar=grammar)


def tool_name(declared: Body) -> str:
    name = declared.required_string("name")
    if not NAME.fullmatch(name):
        raise declared.wrong("name", "1 to 128 letters, digits, underscores, dots or hyphens")
    return name
