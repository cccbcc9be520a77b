"""What a reply must look like, as a grammar: reasoning, then calls or content.

A schema, a required call or no call is enforced behind the reasoning, which is free. What cannot be
enforced in a format of calls is refused by name: nothing is enforced in part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pippin.api.requests.body import Leniency
from pippin.api.requests.neutral_request import ChatRequest, Options, ToolUse
from pippin.api.requests.tools import INPUT, input_schema
from pippin.decode.json_schema import ONE_LINE, check_schema, closed, expressed, regex_terminal
from pippin.decode.size import check_size
from pippin.errors import RequestError, UnsupportedField
from pippin.text.bundle import TextBundle
from pippin.text.parsers.formats import HARMONY, REASONING_FORMATS, TOOL_FORMATS
from pippin.text.parsers.json_calls import (
    ANALYSIS,
    COMMENTARY,
    FINAL,
    NEXT_MESSAGE,
    REPLY_BEGINS,
)
from pippin.text.prompt import Prompt
from pippin.text.tokenizer import Tokenizer
from pippin.types import GrammarPart, GrammarSpec, SamplingParams

ANY_TEXT = "TEXT"


class Lark:
    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = {*tokenizer.added_ids, *tokenizer.special_ids}
        texts = {tokenizer.token_text(id): id for id in ids}
        self._marks = {text: id for text, id in texts.items() if text.strip()}
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._parts = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self.rules = [f"{ANY_TEXT}: /(?s:.*)/"]

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.rules]) + "\n"

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def recursive(self, body: Callable[[str], str]) -> str:
        at = len(self.rules)
        name = self.rule("")
        self.rules[at] = f"{name}: {body(name)}"
        return name

    def begins_with_mark(self, text: str) -> bool:
        return self._split(text)[0] in self._marks

    def literal(self, text: str) -> str:
        parts = [
            f"<[{self._marks[part]}]>" if part in self._marks else json.dumps(part)
            for part in self._split(text)
        ]
        return " ".join(parts)

    def until(self, end: str, text: str = "/(?s:.*)/") -> str:
        """Any text, or that of a terminal, up to and with the first `end`."""
        first, *rest = self._split(end)
        if first in self._marks:
            return f"{text} {self.literal(end)}"
        lazy = self.rule(f"{text} {json.dumps(first)}", "[lazy]")
        return " ".join([lazy, *map(self.literal, rest)])

    def json(self, schema: dict[str, object]) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}")

    def nested(self, lark: str) -> str:
        return self.rule(f"%lark {{\n{lark}\n}}")

    def _split(self, text: str) -> list[str]:
        if not self._marks:
            return [text]
        return [part for part in self._parts.split(text) if part] or [""]


def in_order(lark: Lark, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Items in this order with separators between them; some are required, others may be missing.

    Empty, if there are none.
    """
    # From the last item: what may follow an item, and what may follow none.
    after, before = "", ""
    for item, is_required in reversed(items):
        rest = lark.rule(after) if after else ""
        first, later = f"{item} {rest}", f"{json.dumps(separator)} {item}"
        if is_required:
            after, before = f"{later} {rest}", first
        else:
            after = f"({later})? {rest}"
            before = f"({first} | {lark.rule(before)})" if before else f"({first})?"
    return before


def alternatives(choices: list[str]) -> str:
    return "(" + " | ".join(choices) + ")"


Schema = dict[str, Any]
Refuse = Callable[[str], UnsupportedField]
_BARE_KEY = r'/[^\s:{}\[\],<>|"]+/'
_NO_RULES = {"title", "description", "default", "examples", "$defs", "definitions"}
_SCALARS = ("integer", "number", "boolean", "null")
_KNOWN = {
    "string": {"type", "enum", "const"},
    "array": {"type", "items"},
    "object": {"type", "properties", "required", "additionalProperties"},
}


class BareKeyRules:
    def __init__(self, lark: Lark, quote: str, refuse: Refuse) -> None:
        self._lark = lark
        self._quote = quote
        self._refuse = refuse
        self._definitions: dict[str, Any] = {}
        self._rules: dict[str, str] = {}  # of definitions, by reference

    def text(self, ended: str) -> str:
        """A string, of which all but the first mark is given."""
        return f"{self._lark.literal(self._quote)} {ended}"

    def any_object(self) -> str:
        return self._members(f"{_BARE_KEY} {_literal(':')} {self._any_value()}")

    def object(self, schema: Schema) -> str:
        """The arguments of one function, as its schema wants them."""
        self._rules = {}
        self._definitions = {
            f"#/{place}/{name}": inner
            for place in ("$defs", "definitions")
            for name, inner in schema.get(place, {}).items()
        }
        return self._value(schema, "its parameters")

    def _value(self, schema: Any, where: str) -> str:
        if schema is True or (isinstance(schema, dict) and schema.keys() <= _NO_RULES):
            return self._any_value()
        if not isinstance(schema, dict):
            raise self._refuse(f"{where} is not a schema that can be enforced")
        if "$ref" in schema:
            return self._reference(schema["$ref"], where)
        kind = schema.get("type")
        several = kind if isinstance(kind, list) else []
        choices = schema.get("anyOf") or [{**schema, "type": each} for each in several]
        if choices:
            return alternatives([self._value(each, where) for each in choices])
        if kind is None and (values := _values(schema)):
            kind = "string" if all(isinstance(each, str) for each in values) else None
            if not any(isinstance(each, str | list | dict) for each in values):
                return self._lark.json(schema)
        if kind in _SCALARS:
            return self._lark.json(schema)
        for keyword in schema:
            if keyword not in _NO_RULES | _KNOWN.get(str(kind), {"type"}):
                raise self._refuse(f"{keyword} of {where}")
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._items(schema.get("items", True), where)
        if kind == "object":
            return self._object(schema, where)
        raise self._refuse(f"the type of {where}")

    def _reference(self, reference: Any, where: str) -> str:
        if reference not in self._definitions:
            raise self._refuse(f"$ref of {where}")
        if reference not in self._rules:
            schema = self._definitions[reference]

            def body(name: str) -> str:
                self._rules[reference] = name
                return self._value(schema, where)

            return self._lark.recursive(body)
        return self._rules[reference]

    def _string(self, schema: Schema) -> str:
        values = _values(schema)
        if not values:
            return self.text(self._lark.until(self._quote))
        return alternatives(
            [self._lark.literal(f"{self._quote}{each}{self._quote}") for each in values]
        )

    def _items(self, items: Any, where: str) -> str:
        item = self._value(items, f"the items of {where}")
        return f"{_literal('[')} ({item} ({_literal(',')} {item})*)? {_literal(']')}"

    def _object(self, schema: Schema, where: str) -> str:
        properties, extra = schema.get("properties"), schema.get("additionalProperties", False)
        if not properties and extra is not False:
            if extra is not True:
                raise self._refuse(f"additionalProperties of {where}")
            return self.any_object()
        if not properties and "additionalProperties" not in schema:
            return self.any_object()
        if extra is not False:
            raise self._refuse(f"additionalProperties of {where}")
        required = schema.get("required", ())
        pairs = [
            (f"{self._lark.literal(f'{key}:')} {self._value(inner, key)}", key in required)
            for key, inner in (properties or {}).items()
        ]
        return f"{_literal('{')} {in_order(self._lark, pairs, ',')} {_literal('}')}"

    def _any_value(self) -> str:
        string = self.text(self._lark.until(self._quote))
        scalar = self._lark.json({"type": ["number", "boolean", "null"]})

        def body(value: str) -> str:
            items = f"{_literal('[')} ({value} ({_literal(',')} {value})*)? {_literal(']')}"
            pair = f"{_BARE_KEY} {_literal(':')} {value}"
            return alternatives([string, scalar, items, self._members(pair)])

        return self._lark.recursive(body)

    def _members(self, pair: str) -> str:
        return f"{_literal('{')} ({pair} ({_literal(',')} {pair})*)? {_literal('}')}"


def _values(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else schema.get("enum") or []


def _literal(text: str) -> str:
    return f'"{text}"'


_NUMBER = "{number}"
_KEY = r"/[^\W\d]\w*/"
_SAY_NOTHING = {"type", "title", "description", "default", "examples"}


class CallRules:
    """A required call obeys its tool's schema, if that can be enforced; a strict one always."""

    def __init__(
        self,
        lark: Lark,
        format: str,
        tool_use: ToolUse,
        leniency: Leniency | None = None,
        *,
        holds_required: bool = True,
    ) -> None:
        self._lark = lark
        self._format = format
        self._syntax = TOOL_FORMATS[format]
        self._tool_use = tool_use
        self._leniency = leniency or Leniency()
        self._holds_required = holds_required and tool_use.required

    def calls(self) -> str:
        """The calls of a reply, one at least."""
        lark, syntax = self._lark, self._syntax
        call = lark.rule(
            alternatives([self._call(tool["function"]) for tool in self._tool_use.allowed])
        )
        # Harmony's calls end a reply, each with an end token of the model's own.
        several = self._tool_use.parallel and self._format != HARMONY
        more = f"({self._literal(syntax.separator)} {call})*" if several else ""
        opening, closing = self._literal(syntax.opening), self._literal(syntax.closing)
        return lark.rule(f"{opening} {call} {more} {closing}")

    def check_optional(self) -> None:
        """Raise unless the start of a call differs from content."""
        if not self._lark.begins_with_mark(self._syntax.trigger):
            asked = "tool_choice" if self._tool_use.required else "parallel_tool_calls"
            param, what = ("tools", "strict") if self._tool_use.strict else (asked, asked)
            raise UnsupportedField(
                f"{what} cannot be enforced: calls in the format {self._format} can be "
                "constrained only if one is required",
                param=param,
            )

    def _call(self, function: Schema) -> str:
        syntax, name = self._syntax, function["name"]
        head = self._literal(syntax.before_name + name + syntax.before_arguments)
        arguments = self._arguments(function)
        end = "" if self._format == HARMONY else self._literal(syntax.after_arguments)
        return f"{head} {arguments} {end}"

    def _arguments(self, function: Schema) -> str:
        if function["name"] in self._tool_use.custom:
            return self._input(self._tool_use.custom[function["name"]])
        if function.get("strict"):
            return self._held_arguments(function)
        if self._holds_required and (function.get("parameters") or {}).get("properties"):
            num_rules = len(self._lark.rules)
            try:
                return self._held_arguments(function)
            except UnsupportedField as error:
                del self._lark.rules[num_rules:]  # those of what cannot be expressed
                self._leniency.ignore("tools.parameters", error.message, function["name"])
        return self._any_arguments(function["name"])

    def _held_arguments(self, function: Schema) -> str:
        schema = self._object_schema(function)
        match self._syntax.style:
            case "bare_keys":
                return self._bare_keys(function["name"]).object(schema)
            case "keywords":
                return self._keywords(schema)
            case "tags":
                return self._strict_tagged(function["name"], schema)
            case "json":
                return self._lark.json(schema)

    def _any_arguments(self, name: str) -> str:
        tags = self._syntax
        match tags.style:
            case "bare_keys":
                return self._bare_keys(name).any_object()
            case "keywords":
                return self._keywords(None)
            case "json":
                return self._lark.json({"type": "object"})
        if tags.types:
            return f"({self._literal(tags.before_key)} {self._any_typed()})*"
        value = self._lark.until(tags.after_value)
        key = self._lark.until(tags.before_value())
        return f"({self._literal(tags.before_key)} {key} {value})*"

    def _any_typed(self) -> str:
        """Any key and value, where what stands before a value says of which type it is."""
        heads: dict[str, list[str]] = {}
        for type in self._syntax.types:
            heads.setdefault(self._syntax.before_value(type), []).append(type)
        end = self._literal(self._syntax.after_value)
        choices = [
            f"{self._literal(head)} {self._lark.until(self._syntax.after_value)}"
            if "string" in types
            else f"{self._literal(head)} {self._lark.json({'type': types})} {end}"
            for head, types in heads.items()
        ]
        return f'/[^"\\n]+/ {alternatives(choices)}'

    def _keywords(self, schema: Schema | None) -> str:
        """`a="x", b=2`; with a schema, its properties in order."""
        if schema is None:
            pair = f'{_KEY} "=" {self._lark.json({})}'
            return f'({pair} (", " {pair})*)?'
        required = schema.get("required", ())
        pairs = [
            (f"{self._literal(f'{key}=')} {self._property(declared, schema)}", key in required)
            for key, declared in schema.get("properties", {}).items()
        ]
        return in_order(self._lark, pairs, ", ")

    def _property(self, declared: Any, schema: Schema) -> str:
        """A value as JSON. A property may refer to definitions of the whole."""
        definitions: Schema = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
        return self._lark.json({**declared, **definitions} if isinstance(declared, dict) else {})

    def _input(self, grammar: GrammarPart | None) -> str:
        tags = self._syntax
        if tags.style == "tags":
            head = self._literal(tags.before_key + INPUT + tags.before_value())
            return f"{head} {self._text(grammar, tags.after_value)}"
        if tags.style == "bare_keys":
            head = self._literal("{" + INPUT + ":" + tags.quote)
            return f"{head} {self._text(grammar, tags.quote)} {self._literal('}')}"
        schema = input_schema()
        if grammar is not None and grammar.syntax == "lark":
            raise UnsupportedField(
                f"{grammar.field} cannot be enforced: in the format {self._format} an input is "
                "written as a JSON string, which a Lark grammar does not describe; use a regex",
                param=grammar.field,
            )
        if grammar is not None:
            schema["properties"][INPUT]["pattern"] = f"^(?:{grammar.text})$"
        return self._keywords(schema) if tags.style == "keywords" else self._lark.json(schema)

    def _text(self, grammar: GrammarPart | None, end: str) -> str:
        """A text without quotes, and its end."""
        if grammar is None:
            return self._lark.until(end)
        if grammar.syntax == "regex":
            return self._lark.until(end, regex_terminal(grammar.text))
        return f"{self._lark.nested(grammar.text)} {self._literal(end)}"

    def _bare_keys(self, name: str) -> BareKeyRules:
        def refuse(what: str) -> UnsupportedField:
            message = f"strict cannot be enforced for {name}: {what}, in the format {self._format}"
            return UnsupportedField(message, param="tools")

        return BareKeyRules(self._lark, self._syntax.quote, refuse)

    def _strict_tagged(self, name: str, schema: Schema) -> str:
        """Every property in the order of the schema; what is not required may be left out."""
        required = schema.get("required", ())
        parts = []
        for key, declared in schema.get("properties", {}).items():
            kind, value = self._tagged_value(f"{name}: {key}", declared, schema)
            head = self._literal(self._syntax.before_key + key + self._syntax.before_value(kind))
            parts.append(f"({head} {value})" + ("" if key in required else "?"))
        return " ".join(parts)

    def _tagged_value(self, where: str, declared: Any, schema: Schema) -> tuple[str, str]:
        """A value's type, and the value. Strings have no quotes here, so a grammar must know which
        values are strings."""
        kind = declared.get("type") if isinstance(declared, dict) else None
        end = self._literal(self._syntax.after_value)
        choices = declared.get("enum") if isinstance(declared, dict) else None
        if choices and all(isinstance(choice, str) for choice in choices):
            return "string", f"{alternatives([self._literal(each) for each in choices])} {end}"
        if kind == "string" and declared.keys() <= _SAY_NOTHING:
            return kind, self._lark.until(self._syntax.after_value)
        if kind in ("integer", "number", "boolean", "array", "object", "null"):
            return kind, f"{self._property(declared, schema)} {end}"
        raise UnsupportedField(
            f"strict cannot be enforced for {where}: in the format {self._format} an argument is "
            "a plain string, an enum of strings, or of one other type",
            param="tools",
        )

    def _object_schema(self, function: Schema) -> Schema:
        """What the arguments must be, if that can be enforced. `strict` leaves no keyword out."""
        name: str = function["name"]
        schema: Schema = function.get("parameters") or {"type": "object", "properties": {}}
        if not function.get("strict"):
            schema = expressed(schema, lambda keyword: self._leave_out(keyword, name))
        try:
            schema = check_schema(json.dumps(schema))
        except RequestError as error:
            why = error.message.removeprefix("json_schema: ")
            message = f"strict cannot be enforced for {name}: {why}"
            raise UnsupportedField(message, param="tools") from error
        if schema.get("type") != "object":
            raise UnsupportedField(
                f"strict cannot be enforced for {name}: its parameters must be an object",
                param="tools",
            )
        return dict(closed(schema))

    def _leave_out(self, keyword: str, name: str) -> None:
        self._leniency.ignore(f"tools.parameters.{keyword}", "it cannot be enforced", name)

    def _literal(self, text: str) -> str:
        before, number, after = text.partition(_NUMBER)
        if not number:
            return self._lark.literal(text) if text else ""
        return f"{self._lark.literal(before)} /[0-9]+/ {self._literal(after)}"


_SPACE = "/[ \\n]{0,4}/"
_RECIPIENT = "/[^<\\n]{0,64}/"


def can_forbid_calls(text: TextBundle) -> bool:
    """Whether a model that knows of tools can be kept from calling them."""
    if text.formats.tools is None or not text.tokenizer.spells_bytes:
        return False
    trigger = TOOL_FORMATS[text.formats.tools].trigger
    return bool(text.tokenizer.eos_ids) and Lark(text.tokenizer).begins_with_mark(trigger)


def constrain(request: ChatRequest, prompt: Prompt, text: TextBundle) -> SamplingParams:
    """The request's parameters, with a grammar of all its constraints.

    A required call of tools whose schemas are too large together is any call, unless `strict`.
    """
    try:
        return _constrain(request, prompt, text)
    except UnsupportedField:
        raise
    except RequestError as error:
        if not request.tool_use.required or request.tool_use.strict:
            raise
        request.leniency.ignore("tools.parameters", error.message)
        return _constrain(request, prompt, text, holds_required=False)


def _constrain(
    request: ChatRequest, prompt: Prompt, text: TextBundle, *, holds_required: bool = True
) -> SamplingParams:
    params, tool_use = request.options.params, request.tool_use
    lark = Lark(text.tokenizer)
    reasoning = _reasoning(lark, prompt, text)
    content, free = _content(lark, params), ANY_TEXT
    if in_channels := _begins_message(prompt, text):
        header = lark.literal(FINAL)
        content, free = content and f"{header} {content}", f"{header} {ANY_TEXT}"
    if not tool_use.allowed:
        if tool_use.tools and can_forbid_calls(text):
            _check_composes(params, "calls are forbidden")
            return _with_grammar(request.options, lark, f"{reasoning} {content or free}")
        if params.grammar is None or not reasoning:
            return params
        _check_composes(params, "this model reasons first")
        return _with_grammar(request.options, lark, f"{reasoning} {content}")
    if tool_use.is_free and params.grammar is None:
        return params
    assert text.formats.tools is not None, "checked where the prompt was made"
    rules = CallRules(
        lark, text.formats.tools, tool_use, request.leniency, holds_required=holds_required
    )
    parts = tool_use.grammars
    if tool_use.required:
        _check_composes(params, "the reply must be a call")  # a schema holds for content: none
        start = f"{reasoning} {_required(lark, rules.calls(), text)}"
        return _with_grammar(request.options, lark, start, parts)
    rules.check_optional()
    _check_composes(params, "the reply may also be a call")
    if content or in_channels:
        start = f"{reasoning} ({content or free} | {rules.calls()})"
    else:
        start = f"{reasoning} {ANY_TEXT} {rules.calls()}?"
    return _with_grammar(request.options, lark, start, parts)


def _reasoning(lark: Lark, prompt: Prompt, text: TextBundle) -> str:
    """Reasoning before the rest; empty, if the prompt has closed it already."""
    if _begins_message(prompt, text):
        heads = alternatives([lark.literal(head) for head in (ANALYSIS, COMMENTARY)])
        return lark.rule(f"({heads} {ANY_TEXT} {lark.literal(NEXT_MESSAGE)})*")
    if text.formats.reasoning not in REASONING_FORMATS:
        return ""
    marks = REASONING_FORMATS[text.formats.reasoning]
    if prompt.ending.rstrip().endswith(marks.end):
        return ""
    rest = f"{lark.until(marks.end)} {_SPACE}"
    if marks.is_open_after(prompt.ending):
        return lark.rule(rest)
    return lark.rule(f"({_SPACE} {lark.literal(marks.begin)} {rest})?")


def _required(lark: Lark, calls: str, text: TextBundle) -> str:
    """Calls, and what templates write around them: white space, the marks of an empty answer."""
    marks = REASONING_FORMATS.get(text.formats.reasoning or "")
    if marks is None or not marks.headers:
        return f"{_SPACE} {calls}"
    headers = [
        f"{lark.literal(begin)} {_RECIPIENT} {lark.literal(end)}" if end else lark.literal(begin)
        for begin, end in marks.headers
    ]
    header = f"({alternatives(headers)} {_SPACE})?"
    trailer = f"({alternatives([lark.literal(each) for each in marks.trailers])} {_SPACE})?"
    return f"{_SPACE} {header} {trailer} {calls} {_SPACE} {trailer}"


def _begins_message(prompt: Prompt, text: TextBundle) -> bool:
    """Whether the reply is made of Harmony's messages, and begins with the header of one."""
    is_harmony = HARMONY in (text.formats.reasoning, text.formats.tools)
    return is_harmony and prompt.ending.endswith(REPLY_BEGINS)


def _content(lark: Lark, params: SamplingParams) -> str:
    """The schema that content must obey; nothing, if there is none."""
    grammar = params.grammar
    if grammar is None or grammar.kind != "json_schema":
        return ""
    return lark.json(closed(check_schema(grammar.text)))


def _check_composes(params: SamplingParams, why: str) -> None:
    for field in ("regex", "ebnf"):
        if getattr(params, field) is not None:
            raise UnsupportedField(f"{field} cannot be enforced, because {why}", param=field)


def _with_grammar(
    options: Options, lark: Lark, start: str, parts: tuple[GrammarPart, ...] = ()
) -> SamplingParams:
    grammar = lark.text(start)
    nbytes = len(grammar.encode())
    if nbytes > options.max_schema_bytes:
        raise RequestError(
            f"the tools' grammar has {nbytes:,} bytes; at most {options.max_schema_bytes:,} are "
            "allowed (--max-schema-bytes)",
            param="tools",
        )
    check_size(GrammarSpec("ebnf", grammar), "tools")
    return replace(options.params, json_schema=None, regex=None, ebnf=grammar, grammar_parts=parts)
