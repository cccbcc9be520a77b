"""GLM 4.5 to 4.7 and LongCat: `<tool_call>f<arg_key>a</arg_key><arg_value>...</arg_value>...`."""

from __future__ import annotations

from typing import ClassVar

from pippin.text.lexer import Marks, Steps
from pippin.text.parsers.json_calls import JsonCallParser
from pippin.text.parsers.syntax import CallSyntax, TaggedArguments
from pippin.text.parsers.tagged_calls import TaggedCallParser


class GlmParser(TaggedCallParser):
    call, call_end = "<tool_call>", "</tool_call>"
    key: ClassVar[tuple[str, str]] = ("<arg_key>", "</arg_key>")
    value, value_end = "<arg_value>", "</arg_value>"
    begins = (call,)
    other_marks = (call_end, *key, value, value_end)
    after_value = (key[0], call_end)
    after_call = begins
    syntax = CallSyntax(
        before_name="<tool_call>",
        before_arguments="\n",
        after_arguments="</tool_call>",
        separator="\n",
        arguments=TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    )

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(self.call)
        yield from self.read_tags()

    def read_tags(self) -> Steps[None]:
        after_name = Marks.of(self.key[0], self.call_end, self.call, "\n", "{")
        self.begin_call((yield from self.lexer.name_before(after_name)))
        yield from self.lexer.space()
        while not (yield from self.lexer.accept(self.call_end)):
            yield from self.lexer.expect(self.key[0])
            key = yield from self.lexer.name_before(Marks.of(self.key[1], "\n"))
            yield from self.lexer.expect(self.key[1])
            yield from self.lexer.space()
            yield from self.lexer.expect(self.value)
            yield from self.argument(key)
            yield from self.lexer.space()
        self.finish_call()


class Glm47Parser(GlmParser):
    """Without the line breaks."""

    syntax = CallSyntax(
        before_name="<tool_call>",
        before_arguments="",
        after_arguments="</tool_call>",
        arguments=TaggedArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    )


class LongCatParser(GlmParser, JsonCallParser):
    """The same with other tags. The models also write a JSON object between them."""

    call, call_end = "<longcat_tool_call>", "</longcat_tool_call>"
    key = ("<longcat_arg_key>", "</longcat_arg_key>")
    value, value_end = "<longcat_arg_value>", "</longcat_arg_value>"
    begins, ends = (call,), (call_end,)
    next_marks = begins
    other_marks = (call_end, *key, value, value_end)
    after_value = (key[0], call_end)
    after_call = begins
    syntax = CallSyntax(
        before_name="<longcat_tool_call>",
        before_arguments="\n",
        after_arguments="</longcat_tool_call>",
        separator="\n",
        arguments=TaggedArguments(
            "<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"
        ),
    )

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(self.call)
        yield from self.lexer.space()
        if (yield from self.lexer.peek()) != "{":
            yield from self.read_tags()
            return
        yield from self.object_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(self.call_end)
