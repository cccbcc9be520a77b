"""Calls as `<invoke name="f"><parameter name="a">...</parameter></invoke>`, a class of data each.

A tag may have further attributes. One of them may say which type a value has: then that counts,
and not the tool's schema.
"""

from __future__ import annotations

import html
from typing import ClassVar

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.json_calls import JsonReader
from pippin.text.parsers.schema_types import argument_types
from pippin.text.parsers.syntax import CallSyntax, TaggedArguments
from pippin.text.parsers.tagged_calls import STRING, TaggedCallParser

MAX_ATTRIBUTES = 8  # of one tag
_AFTER_ATTRIBUTE = Marks.of("=", '"', "<", ">", "\n")
_AFTER_VALUE = Marks.of('"', "\n")
CDATA, CDATA_END = "<![CDATA[", "]]>"


class AttributeTagParser(TaggedCallParser):
    call: ClassVar[str]  # a call's tag, up to its first attribute
    parameter: ClassVar[str]
    tag_end: ClassVar[str] = ">"
    name_attribute: ClassVar[str] = "name"
    key_attribute: ClassVar[str] = "name"

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(self.call)
        attributes = yield from self._attributes()
        yield from self.lexer.space()
        name = attributes.get(self.name_attribute)
        if not name:
            raise Malformed
        yield from self.read_arguments(name)

    def read_arguments(self, name: str) -> Steps[None]:
        """From behind a call's tag to its end."""
        self.begin_call(name)
        while not (yield from self.lexer.accept(self.call_end)):
            yield from self.lexer.expect(self.parameter)
            attributes = yield from self._attributes()
            if self.key_attribute not in attributes:
                raise Malformed
            yield from self.argument(
                attributes[self.key_attribute], self.written_types(name, attributes)
            )
            yield from self.lexer.space()
        self.finish_call()

    def written_types(self, name: str, attributes: dict[str, str]) -> frozenset[str] | None:
        """What the tag says of its value's type; None leaves it to the schema."""
        return None

    def _attributes(self) -> Steps[dict[str, str]]:
        """All of a tag's, and its end."""
        found: dict[str, str] = {}
        while True:
            yield from self.lexer.space()
            if (yield from self.lexer.accept(self.tag_end)):
                return found
            name = yield from self.lexer.name_before(_AFTER_ATTRIBUTE)
            yield from self.lexer.expect("=")
            yield from self.lexer.expect('"')
            found[name] = html.unescape((yield from self.lexer.name_before(_AFTER_VALUE)))
            yield from self.lexer.expect('"')
            if len(found) > MAX_ATTRIBUTES:
                raise Malformed


class MiniMaxM2Parser(AttributeTagParser):
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call, call_end = "<invoke ", "</invoke>"
    parameter, value_end = "<parameter ", "</parameter>"
    begins = (call,)
    after_value = (parameter, call_end)
    after_call = (call, section[1])
    syntax = CallSyntax(
        opening="<minimax:tool_call>\n",
        before_name='<invoke name="',
        before_arguments='">\n',
        after_arguments="</invoke>\n",
        closing="</minimax:tool_call>",
        arguments=TaggedArguments('<parameter name="', '">', "</parameter>\n"),
    )


class MuseSparkParser(AttributeTagParser):
    section = ("<atem:function_calls>", "</atem:function_calls>")
    call, call_end = "<atem:invoke ", "</atem:invoke>"
    parameter, value_end = "<atem:parameter ", "</atem:parameter>"
    begins = (call,)
    after_value = (parameter, call_end)
    after_call = (call, section[1])
    syntax = CallSyntax(
        opening="<atem:function_calls>\n",
        before_name='<atem:invoke name="',
        before_arguments='">\n',
        after_arguments="</atem:invoke>\n",
        closing="</atem:function_calls>",
        arguments=TaggedArguments('<atem:parameter name="', '">', "</atem:parameter>\n"),
    )


class DeepSeekV32Parser(AttributeTagParser):
    section = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    call, call_end = "<｜DSML｜invoke ", "</｜DSML｜invoke>"
    parameter, value_end = "<｜DSML｜parameter ", "</｜DSML｜parameter>"
    begins = (call,)
    other_marks = ("｜DSML｜",)
    after_value = (parameter, call_end)
    after_call = (call, section[1])
    _arguments = TaggedArguments(
        '<｜DSML｜parameter name="',
        '" string="false">',
        "</｜DSML｜parameter>\n",
        before_type={"string": '" string="true">'},
    )
    syntax = CallSyntax(
        opening="<｜DSML｜function_calls>\n",
        before_name='<｜DSML｜invoke name="',
        before_arguments='">\n',
        after_arguments="</｜DSML｜invoke>\n",
        closing="</｜DSML｜function_calls>",
        arguments=_arguments,
    )

    def written_types(self, name: str, attributes: dict[str, str]) -> frozenset[str] | None:
        is_string = attributes.get("string")
        if is_string == "true":
            return STRING
        declared = argument_types(self.tools.get(name), attributes[self.key_attribute])
        return declared - STRING if is_string == "false" else declared


class DeepSeekV4Parser(DeepSeekV32Parser):
    section = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")
    after_call = (DeepSeekV32Parser.call, section[1])
    syntax = CallSyntax(
        opening="<｜DSML｜tool_calls>\n",
        before_name='<｜DSML｜invoke name="',
        before_arguments='">\n',
        after_arguments="</｜DSML｜invoke>\n",
        closing="</｜DSML｜tool_calls>",
        arguments=DeepSeekV32Parser._arguments,
    )


class MiniCpm5Parser(AttributeTagParser):
    """A value with `<`, `&` or a line break in it stands in a CDATA block."""

    call, call_end = "<function ", "</function>"
    parameter, value_end = "<param ", "</param>"
    begins = (call,)
    after_value = (parameter, call_end)
    after_call = begins
    quotes = ((CDATA, CDATA_END + value_end),)
    syntax = CallSyntax(
        before_name='<function name="',
        before_arguments='">',
        after_arguments="</function>",
        arguments=TaggedArguments('<param name="', '">', "</param>"),
    )


class KimiK3Parser(AttributeTagParser):
    """Arguments in tags of their own, each with its type, or all of them as one JSON object."""

    section = ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
    call, call_end = "<|open|>call ", "<|close|>call<|sep|>"
    parameter, value_end = "<|open|>argument ", "<|close|>argument<|sep|>"
    tag_end = "<|sep|>"
    name_attribute, key_attribute = "tool", "key"
    begins = (call,)
    other_marks = ("<|open|>", "<|close|>", "<|sep|>")
    after_value = (parameter, call_end)
    after_call = (call, section[1])
    ends_reasoning = True
    syntax = CallSyntax(
        opening="<|open|>tools<|sep|>",
        before_name='<|open|>call tool="',
        before_arguments='" index="{number}"<|sep|>',
        after_arguments="<|close|>call<|sep|>",
        closing="<|close|>tools<|sep|>",
        arguments=TaggedArguments(
            '<|open|>argument key="',
            '" type="string"<|sep|>',
            "<|close|>argument<|sep|>",
            before_type={
                type: f'" type="{type}"<|sep|>'
                for type in ("number", "boolean", "null", "array", "object")
            },
        ),
    )

    def written_types(self, name: str, attributes: dict[str, str]) -> frozenset[str] | None:
        return frozenset({attributes["type"]}) if "type" in attributes else None

    def read_arguments(self, name: str) -> Steps[None]:
        if not (yield from self.lexer.accept("<|open|>json ")):
            yield from super().read_arguments(name)
            return
        yield from self._attributes()
        yield from self.lexer.space()
        json_end = "<|close|>json<|sep|>"
        yield from JsonReader(self, (json_end,), (self.call_end,)).call_arguments(name)
        yield from self.lexer.space()
        yield from self.lexer.accept(json_end)
        self.end_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(self.call_end)
