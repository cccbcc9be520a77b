"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from pippin.text.lexer import Steps
from pippin.text.parsers.json_calls import JsonCallParser
from pippin.text.parsers.syntax import CallSyntax, JsonArguments

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    begins = (BEGIN,)
    ends = (END,)
    next_marks = (BEGIN,)
    other_marks = (END,)
    syntax = CallSyntax(
        before_name='<tool_call>\n{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}\n</tool_call>",
        separator="\n",
        arguments=JsonArguments(),
    )

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(BEGIN)
        yield from self.lexer.space()
        yield from self.object_call()
        yield from self.lexer.space()
        while (yield from self.lexer.accept("}")):  # one too many is a common slip
            yield from self.lexer.space()
        yield from self.lexer.accept(END)
