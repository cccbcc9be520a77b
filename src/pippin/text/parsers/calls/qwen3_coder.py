"""Qwen3-Coder and Qwen3.5: `<function=f><parameter=a>...</parameter></function>`, in `<tool_call>`.

The models at times leave out `<tool_call>`, or the end of a parameter: both are read.
"""

from __future__ import annotations

from pippin.text.lexer import Marks, Steps
from pippin.text.parsers.syntax import CallSyntax, TaggedArguments
from pippin.text.parsers.tagged_calls import TaggedCallParser

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_AFTER_NAME = Marks.of(">", "<", "\n")


class Qwen3CoderParser(TaggedCallParser):
    begins = (CALL, FUNCTION)
    other_marks = (CALL_END,)
    value_end = PARAMETER_END
    after_value = (PARAMETER, FUNCTION_END, CALL_END)
    implied_ends = ((f"\n{PARAMETER}", ("",)), (f"\n{FUNCTION_END}", (CALL_END,)))
    call_end = CALL_END
    after_call = begins
    pads_values = True
    syntax = CallSyntax(
        before_name="<tool_call>\n<function=",
        before_arguments=">\n",
        after_arguments="</function>\n</tool_call>",
        separator="\n",
        arguments=TaggedArguments("<parameter=", ">\n", "\n</parameter>\n"),
    )

    def read_call(self) -> Steps[None]:
        yield from self.lexer.accept(CALL)
        yield from self.lexer.space()
        yield from self.lexer.expect(FUNCTION)
        name = yield from self._name_in_tag()
        self.begin_call(name)
        while True:
            yield from self.lexer.space()
            if (yield from self.lexer.accept(FUNCTION_END)):
                break
            if (yield from self.lexer.is_next(CALL_END)):
                break
            yield from self.lexer.expect(PARAMETER)
            yield from self.argument((yield from self._name_in_tag()))
        self.finish_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(CALL_END)

    def _name_in_tag(self) -> Steps[str]:
        name = yield from self.lexer.name_before(_AFTER_NAME)
        yield from self.lexer.expect(">")
        return name
