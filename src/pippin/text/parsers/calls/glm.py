"""GLM 4.5 to 4.7: `<tool_call>f<arg_key>a</arg_key><arg_value>...</arg_value></tool_call>`."""

from __future__ import annotations

from pippin.text.lexer import Marks, Steps
from pippin.text.parsers.syntax import CallSyntax, TaggedArguments
from pippin.text.parsers.tagged_calls import TaggedCallParser

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_AFTER_NAME = Marks.of(KEY, CALL_END, CALL, "\n", "{")
_AFTER_KEY = Marks.of(KEY_END, "\n")


class GlmParser(TaggedCallParser):
    begins = (CALL,)
    other_marks = (CALL_END, KEY, KEY_END, VALUE, VALUE_END)
    value_end = VALUE_END
    after_value = (KEY, CALL_END)
    call_end = CALL_END
    after_call = begins
    syntax = CallSyntax(
        before_name="<tool_call>",
        before_arguments="\n",
        after_arguments="</tool_call>",
        separator="\n",
        arguments=TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    )

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(CALL)
        self.begin_call((yield from self.lexer.name_before(_AFTER_NAME)))
        yield from self.lexer.space()
        while not (yield from self.lexer.accept(CALL_END)):
            yield from self.lexer.expect(KEY)
            key = yield from self.lexer.name_before(_AFTER_KEY)
            yield from self.lexer.expect(KEY_END)
            yield from self.lexer.space()
            yield from self.lexer.expect(VALUE)
            yield from self.argument(key)
            yield from self.lexer.space()
        self.finish_call()
