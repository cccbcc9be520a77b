"""MiniMax M1: `<tool_calls>` around JSON objects, one on a line."""

from __future__ import annotations

from pippin.text.lexer import Steps
from pippin.text.parsers.json_calls import JsonCallParser
from pippin.text.parsers.syntax import CallSyntax, JsonArguments


class MiniMaxM1Parser(JsonCallParser):
    section = ("<tool_calls>", "</tool_calls>")
    begins = ("{",)
    ends = ("</tool_calls>",)
    syntax = CallSyntax(
        opening="<tool_calls>\n",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}\n",
        closing="</tool_calls>",
        arguments=JsonArguments(),
    )

    def read_call(self) -> Steps[None]:
        yield from self.object_call()
