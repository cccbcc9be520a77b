"""Qwen3-Coder, Qwen3.5, Seed-OSS: `<function=f><parameter=a>...</parameter></function>`, wrapped.

The models at times leave out what is around it, or the end of a parameter: both are read.
"""

from __future__ import annotations

from pippin.text.lexer import Marks, Steps
from pippin.text.parsers.syntax import CallSyntax, TaggedArguments
from pippin.text.parsers.tagged_calls import TaggedCallParser

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_AFTER_NAME = Marks.of(">", "<", "\n")


class Qwen3CoderParser(TaggedCallParser):
    call, call_end = "<tool_call>", "</tool_call>"
    begins, ends = (call, FUNCTION), (call_end,)
    value_end = PARAMETER_END
    after_value = (PARAMETER, FUNCTION_END, call_end)
    implied_ends = ((f"\n{PARAMETER}", ("",)), (f"\n{FUNCTION_END}", (call_end,)))
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
        yield from self.lexer.accept(self.call)
        yield from self.lexer.space()
        yield from self.lexer.expect(FUNCTION)
        name = yield from self._name_in_tag()
        self.begin_call(name)
        while True:
            yield from self.lexer.space()
            if (yield from self.lexer.accept(FUNCTION_END)):
                break
            if (yield from self.lexer.is_next(self.call_end)):
                break
            yield from self.lexer.expect(PARAMETER)
            yield from self.argument((yield from self._name_in_tag()))
        self.finish_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(self.call_end)

    def _name_in_tag(self) -> Steps[str]:
        name = yield from self.lexer.name_before(_AFTER_NAME)
        yield from self.lexer.expect(">")
        return name


class SeedOssParser(Qwen3CoderParser):
    call, call_end = "<seed:tool_call>", "</seed:tool_call>"
    begins, ends = (call, FUNCTION), (call_end,)
    after_value = (PARAMETER, FUNCTION_END, call_end)
    implied_ends = ((f"\n{PARAMETER}", ("",)), (f"\n{FUNCTION_END}", (call_end,)))
    after_call = begins
    pads_values = False
    syntax = CallSyntax(
        before_name="<seed:tool_call>\n<function=",
        before_arguments=">\n",
        after_arguments="</function>\n</seed:tool_call>",
        separator="\n",
        arguments=TaggedArguments("<parameter=", ">", "</parameter>\n"),
    )
