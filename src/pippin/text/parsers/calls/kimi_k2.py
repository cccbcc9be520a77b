"""Kimi K2: a call's id is `functions.name:number`, and must come back as the model wrote it."""

from __future__ import annotations

import re

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.json_calls import JsonCallParser
from pippin.text.parsers.syntax import CallSyntax, JsonArguments

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS_BEGIN = "<|tool_call_argument_begin|>"
_AFTER_ID = Marks.of(ARGUMENTS_BEGIN, CALL_END, "\n")
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")


class KimiK2Parser(JsonCallParser):
    section = (SECTION_BEGIN, SECTION_END)
    begins = (CALL_BEGIN,)
    ends = (CALL_END,)
    next_marks = (CALL_BEGIN, SECTION_END)
    other_marks = (CALL_END, ARGUMENTS_BEGIN)
    ends_reasoning = True
    syntax = CallSyntax(
        opening=SECTION_BEGIN,
        before_name=f"{CALL_BEGIN}functions.",
        before_arguments=f":{{number}}{ARGUMENTS_BEGIN}",
        after_arguments=CALL_END,
        closing=SECTION_END,
        arguments=JsonArguments(),
    )

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(CALL_BEGIN)
        id = yield from self.lexer.name_before(_AFTER_ID)
        found = _ID.fullmatch(id)
        yield from self.lexer.space()
        yield from self.lexer.expect(ARGUMENTS_BEGIN)
        yield from self.lexer.space()
        if found is None:
            raise Malformed
        yield from self.json.call_arguments(found["name"], id)
        self.end_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(CALL_END)
