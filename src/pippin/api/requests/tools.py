"""Declared tools and how a reply may call them, for every dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec

from pippin.api.requests.body import MAX_TOOLS, Body, check_count, shown
from pippin.api.requests.neutral_request import ToolUse
from pippin.decode.size import check_nesting_of, check_part_size
from pippin.errors import RequestError
from pippin.types import GrammarPart

Schema = dict[str, Any]
_DATED = re.compile(r"([a-z_]{1,40})_(20[0-9]{6})")
_STRING: Schema = {"type": "string"}
_LINE: Schema = {"type": "integer", "minimum": 0}


def _schema_of(required: tuple[str, ...], **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _said(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def _one_of(*choices: str) -> Schema:
    return {"type": "string", "enum": list(choices)}


_VIEWED = _said(
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "For view: the first and the last line, from 1; -1 is the end of the file",
)
_FILE: Schema = {
    "path": _said(_STRING, "Path of the file or directory"),
    "view_range": _VIEWED,
    "file_text": _said(_STRING, "For create: the text of the file"),
    "old_str": _said(_STRING, "For str_replace: the text to replace, which occurs once"),
    "new_str": _said(_STRING, "For str_replace: the text in its place"),
    "insert_line": _said(_LINE, "For insert: the line after which to insert; 0 is the start"),
    "insert_text": _said(_STRING, "For insert: the text to insert"),
}
_COMMANDS = ("view", "create", "str_replace", "insert")
_OLD_FILE = {name: schema for name, schema in _FILE.items() if name != "insert_text"}
_OLD_FILE["new_str"] = _said(
    _STRING, "For str_replace: the text in its place; for insert: the text"
)

_BASH = (
    "Run a command in a bash shell that stays open between calls",
    _schema_of(
        (),
        command=_said(_STRING, "The command to run; required unless restart is true"),
        restart=_said({"type": "boolean"}, "Start the shell again"),
    ),
)
_EDITOR = (
    "View, create and edit text files",
    _schema_of(("command", "path"), command=_one_of(*_COMMANDS), **_FILE),
)
_OLD_EDITOR = (
    _EDITOR[0],
    _schema_of(("command", "path"), command=_one_of(*_COMMANDS, "undo_edit"), **_OLD_FILE),
)
_MEMORY = (
    "Store and read text files that outlast this conversation, below the directory /memories",
    _schema_of(
        ("command",),
        command=_one_of(*_COMMANDS, "delete", "rename"),
        **_FILE,
        old_path=_said(_STRING, "For rename: the path of the file or directory"),
        new_path=_said(_STRING, "For rename: its new path"),
    ),
)
# By kind: the first date of each form, oldest first.
_FORMS: dict[str, list[tuple[str, tuple[str, Schema]]]] = {
    "bash": [("20241022", _BASH)],
    "text_editor": [("20241022", _OLD_EDITOR), ("20250429", _EDITOR)],
    "memory": [("20250818", _MEMORY)],
}


def client_tool(type: str) -> Schema | None:
    """The description and the parameters of a tool of this type; None: clients do not run it."""
    found = _DATED.fullmatch(type)
    forms = _FORMS.get(found[1], []) if found else []
    for first_date, (description, parameters) in reversed(forms):
        if found is not None and found[2] >= first_date:
            return {"description": description, "parameters": parameters}
    return None


INPUT = "input"
SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # the other half has not arrived


def input_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }


def as_function(name: str, description: str | None, grammar: GrammarPart | None) -> dict[str, Any]:
    """The tool as templates want it. A grammar forbids, it does not explain: the model sees it."""
    described = [description] if description else []
    if grammar is not None:
        described.append(f"The input matches this {SYNTAXES[grammar.syntax]}:\n{grammar.text}")
    function: dict[str, Any] = {"name": name, "parameters": input_schema()}
    if described:
        function["description"] = "\n\n".join(described)
    return {"type": "function", "function": function}


def read_grammar(grammar: Body) -> GrammarPart:
    """`syntax` and `definition`. Whether it is a grammar is known when it is compiled."""
    for field in ("syntax", "definition"):
        grammar.require(field)
    syntax = grammar.one_of("syntax", tuple(SYNTAXES))
    definition, param = grammar.string("definition", ""), grammar.name("definition")
    part = GrammarPart("lark" if syntax == "lark" else "regex", definition, param)
    check_part_size(part)
    return part


def arguments_of(input: str) -> str:
    """A past call's input as the arguments of the function that stood for it."""
    return json.dumps({INPUT: input}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    reader = InputReader()
    return reader.feed(arguments) + reader.close()


class InputReader:
    """Arguments in, as they arrive; their text out.

    Where a model wrote other arguments than one string called "input", the input is their JSON.
    """

    def __init__(self) -> None:
        self._held = ""
        self._in_string = False
        self._over = False

    def feed(self, text: str) -> str:
        self._held += text
        if not self._in_string and not self._over:
            self._find_beginning()
        return self._take_characters() if self._in_string else ""

    def close(self) -> str:
        rest, self._held = self._held, ""
        return "" if self._over else rest

    def _find_beginning(self) -> None:
        if begin := _BEGIN.match(self._held):
            self._held = self._held[begin.end() :]
            self._in_string = True

    def _take_characters(self) -> str:
        found = _CHARACTERS.match(self._held)
        assert found is not None
        characters = found[0]
        if half := _HALF_PAIR.search(characters):
            characters = characters[: half.start()]
        self._held = self._held[len(characters) :]
        if self._held.startswith('"'):
            self._in_string, self._over = False, True
        return _without_halves(json.loads(f'"{characters}"', strict=False))


def _without_halves(text: str) -> str:
    """Half of a surrogate pair is no character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


CONTAINERS = ("container_auto", "container_reference")  # of OpenAI's, in which a shell can run


def _meta(description: str, **schema: Any) -> Any:
    return msgspec.Meta(description=description, extra_json_schema=schema)


Unset = msgspec.UnsetType
Milliseconds = Annotated[int, _meta("Time limit, in ms", minimum=1)]


class LocalShell(msgspec.Struct):
    command: Annotated[list[str], _meta('The command in words: ["bash", "-lc", "ls"]')]
    timeout_ms: Milliseconds | Unset = msgspec.UNSET
    user: Annotated[str, _meta("The user to run it as")] | Unset = msgspec.UNSET
    working_directory: str | Unset = msgspec.UNSET
    env: dict[str, str] | Unset = msgspec.UNSET


class Shell(msgspec.Struct):
    commands: list[str]
    timeout_ms: Milliseconds | Unset = msgspec.UNSET
    max_output_length: (
        Annotated[int, _meta("Characters to return of each command's output", minimum=1)] | Unset
    ) = msgspec.UNSET


class ApplyPatch(msgspec.Struct):
    type: Annotated[
        Literal["create_file", "update_file", "delete_file"],
        msgspec.Meta(extra_json_schema={"type": "string"}),
    ]
    path: Annotated[str, _meta("Path of the file")]
    diff: (
        Annotated[
            str,
            _meta(
                "For create_file: the file's lines, each behind a +. For update_file: hunks, each "
                "a line @@ and then lines that begin with a space (as it is), - (removed) or + "
                "(added). None for delete_file"
            ),
        ]
        | Unset
    ) = msgspec.UNSET

    def __post_init__(self) -> None:
        if (self.diff is msgspec.UNSET) is not (self.type == "delete_file"):
            raise ValueError("all operations but delete_file have a diff")


@dataclass(frozen=True)
class ShellTool:
    """One of them; its type is the name of the function."""

    prefix: str  # of the ids of its calls
    field: str  # of a call: what is to be run
    action: type[msgspec.Struct]  # the function's arguments, and in its call
    description: str
    always: Mapping[str, Any]  # what an action has besides

    @property
    def parameters(self) -> Schema:
        (schema,) = msgspec.json.schema_components([self.action])[1].values()
        kept = {key: schema[key] for key in ("type", "properties", "required")}
        return {**kept, "additionalProperties": False}


SHELL_TOOLS: Mapping[str, ShellTool] = {
    "local_shell": ShellTool(
        *("lsh", "action", LocalShell),
        "Run a command on the user's computer and return its output",
        {"type": "exec", "env": {}},
    ),
    "shell": ShellTool(
        *("sh", "action", Shell),
        "Run shell commands, each in a shell of its own, and return their outputs",
        {"timeout_ms": None, "max_output_length": None},
    ),
    "apply_patch": ShellTool(
        *("apc", "operation", ApplyPatch), "Create, update or delete one file", {}
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
        given = msgspec.json.decode(arguments, type=dict[str, Any])
        sent = {key: value for key, value in given.items() if value is not None}
        action = msgspec.convert(sent, tool.action, strict=False)
    except msgspec.DecodeError:
        return None
    return {"type": f"{name}_call", tool.field: {**tool.always, **msgspec.to_builtins(action)}}


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


FUNCTION, CUSTOM, NAMESPACE, ALLOWED = "function", "custom", "namespace", "allowed_tools"
_CALLED, _SHELLS = (FUNCTION, CUSTOM), tuple(SHELL_TOOLS)
_KNOWN = "function and custom are supported"
MODES = ("auto", "none", "required")
_FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}
_CUSTOM_FIELDS = {"name", "description", "format"}
# What tools of Responses have besides: they are shown at once here, and run by the client.
_ONLY_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
}


def read_tools(body: Body, *, nested: bool) -> ToolUse:
    """`nested`: as in chats, where what a tool is stands in a member with the name of its type."""
    known = _CALLED if nested else (*OWN_KINDS, *_SHELLS)
    bodies = [tool for tool in tool_bodies(body) if nested or not _runs_elsewhere(tool)]
    kept = [tool for tool in bodies if not is_left_out(tool, known)]
    tools = [each for tool in kept for each in _declared(tool, nested=nested)]
    return tool_use(body, tools, _choice(body, nested=nested))


def _runs_elsewhere(tool: Body) -> bool:
    """A shell in a container of OpenAI's: it is left out, as all that only OpenAI can run."""
    environment = tool.object("environment") if tool.get("type") == "shell" else None
    if environment is None or environment.get("type") not in CONTAINERS:
        return False
    environment.ignore("type", "this server runs no tools", environment.required_string("type"))
    return True


def _declared(tool: Body, *, nested: bool) -> list[DeclaredTool]:
    kind = tool.get("type")
    if kind in _SHELLS:
        tool.ignore_unknown({"type", "allowed_callers", "environment"})
        return [DeclaredTool(shell_function(kind), is_shell=True)]
    if kind == NAMESPACE:
        tool.ignore_unknown({"type", "name", "description", "tools"})
        name, description = tool_name(tool), tool.string("description", "")
        kept = [each for each in tool_bodies(tool) if not is_left_out(each, _CALLED)]
        inner = [one for each in kept for one in _declared(each, nested=False)]
        return [each.within(name, description) for each in inner]
    fields = _FUNCTION_FIELDS if kind == FUNCTION else _CUSTOM_FIELDS
    if nested:
        tool.ignore_unknown({"type", kind, "cache_control"})
        tool = tool.required_object(kind)
        tool.ignore_unknown(fields)
    else:
        for field, neutral in _ONLY_NEUTRAL.items():
            if tool.has(field) and tool.get(field) not in neutral:
                tool.ignore(field, "tools are shown at once, and the client runs them")
        also = {"output_schema"} if kind == FUNCTION else set()
        tool.ignore_unknown({"type", *fields, *_ONLY_NEUTRAL, *also})
    if kind == FUNCTION:
        return [function_tool(tool, "parameters")]
    return [custom_tool(tool, grammar_field="grammar" if nested else None)]


def _choice(body: Body, *, nested: bool) -> ToolChoice:
    value = body.get("tool_choice")
    if not isinstance(value, dict):
        return ToolChoice(body.one_of("tool_choice", MODES) or "auto")
    choice = body.required_object("tool_choice")
    kind = choice.get("type")
    if kind in _SHELLS and not nested:
        return ToolChoice.of(kind)
    if kind in (FUNCTION, CUSTOM):
        return ToolChoice.of(_name_in(choice, nested=nested))
    if kind != ALLOWED:
        raise choice.unsupported("type", f"{_KNOWN}, and {ALLOWED}")
    allowed = choice.required_object(ALLOWED) if nested else choice
    allowed.check_known({"type", "mode", "tools"})
    for field in ("mode", "tools"):
        allowed.require(field)
    mode = allowed.one_of("mode", ("auto", "required")) or "auto"
    tools = tool_bodies(allowed)
    if not tools:
        raise allowed.wrong("tools", "a list of at least one tool")
    known = _CALLED if nested else (*_CALLED, *_SHELLS)
    kept = [tool for tool in tools if not is_left_out(tool, known)]
    return ToolChoice(mode, tuple(_name_in(tool, nested=nested) for tool in kept))


def _name_in(tool: Body, *, nested: bool) -> str:
    kind = tool.require("type")
    if kind in _SHELLS and not nested:
        return str(kind)
    if kind not in (FUNCTION, CUSTOM):
        raise tool.unsupported("type", _KNOWN)
    return (tool.required_object(kind) if nested else tool).required_string("name")
