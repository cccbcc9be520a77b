"""MiniMax M2: a section of `<invoke name="f"><parameter name="a">...</parameter></invoke>`."""

from __future__ import annotations

from pippin.text.lexer import Marks, Steps
from pippin.text.parsers.syntax import CallSyntax, TaggedArguments
from pippin.text.parsers.tagged_calls import TaggedCallParser

SECTION, SECTION_END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"
_AFTER_NAME = Marks.of('"', "\n")


class MiniMaxM2Parser(TaggedCallParser):
    section = (SECTION, SECTION_END)
    begins = (INVOKE,)
    value_end = PARAMETER_END
    after_value = (PARAMETER, INVOKE_END)
    call_end = INVOKE_END
    after_call = (INVOKE, SECTION_END)
    syntax = CallSyntax(
        opening="<minimax:tool_call>\n",
        before_name='<invoke name="',
        before_arguments='">\n',
        after_arguments="</invoke>\n",
        closing="</minimax:tool_call>",
        arguments=TaggedArguments('<parameter name="', '">', "</parameter>\n"),
    )

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(INVOKE)
        self.begin_call((yield from self._name_in_tag()))
        yield from self.lexer.space()
        while not (yield from self.lexer.accept(INVOKE_END)):
            yield from self.lexer.expect(PARAMETER)
            yield from self.argument((yield from self._name_in_tag()))
            yield from self.lexer.space()
        self.finish_call()

    def _name_in_tag(self) -> Steps[str]:
        name = yield from self.lexer.name_before(_AFTER_NAME)
        yield from self.lexer.expect('">')
        return name
