"""DeepSeek V3 and R1 (a JSON code block for arguments), and V3.1 (the arguments alone)."""

from __future__ import annotations

from pippin.text.lexer import Marks, Steps
from pippin.text.parsers.json_calls import JsonCallParser
from pippin.text.parsers.syntax import CallSyntax, JsonArguments

SECTION_BEGIN, SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_AFTER_HEAD = Marks.of(SEPARATOR, CALL_END, "\n")
_AFTER_NAME = Marks.of("\n", "`", CALL_END)


class DeepSeekV31Parser(JsonCallParser):
    """Reads both: after the separator V3.1 has the arguments, V3 the name."""

    section = (SECTION_BEGIN, SECTION_END)
    begins = (CALL_BEGIN,)
    ends = (CALL_END,)
    next_marks = (CALL_BEGIN, SECTION_END)
    other_marks = (CALL_END, SEPARATOR)
    ends_reasoning = True
    syntax = CallSyntax(
        opening=SECTION_BEGIN,
        before_name=CALL_BEGIN,
        before_arguments=SEPARATOR,
        after_arguments=CALL_END,
        closing=SECTION_END,
        arguments=JsonArguments(),
    )

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(CALL_BEGIN)
        head = yield from self.lexer.name_before(_AFTER_HEAD)
        yield from self.lexer.expect(SEPARATOR)
        yield from self.lexer.space()
        if (yield from self.lexer.peek()) in ("{", '"'):
            yield from self.json.call_arguments(head)
        else:
            yield from self._read_code_block()
        self.end_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(CALL_END)

    def _read_code_block(self) -> Steps[None]:
        name = yield from self.lexer.name_before(_AFTER_NAME)
        yield from self.lexer.space()
        yield from self.lexer.expect("```json")
        yield from self.lexer.space()
        yield from self.json.call_arguments(name)
        yield from self.lexer.space()
        yield from self.lexer.accept("```")


class DeepSeekV3Parser(DeepSeekV31Parser):
    syntax = CallSyntax(
        opening=SECTION_BEGIN,
        before_name=f"{CALL_BEGIN}function{SEPARATOR}",
        before_arguments="\n```json\n",
        after_arguments=f"\n```{CALL_END}",
        separator="\n",
        closing=SECTION_END,
        arguments=JsonArguments(),
    )
