"""Mistral: `[TOOL_CALLS]` with an array of objects, or with `name[ARGS]{...}` for each call."""

from __future__ import annotations

import secrets
import string

from pippin.text.lexer import Marks, Steps
from pippin.text.parsers.json_calls import JsonCallParser
from pippin.text.parsers.syntax import CallSyntax, JsonArguments

TOOL_CALLS = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
ID_LEN = 9  # letters and digits: Mistral's templates refuse any other id
_AFTER_NAME = Marks.of(ARGS, CALL_ID, "\n", "{")
_AFTER_ID = Marks.of(ARGS, "\n", "{")


class MistralParser(JsonCallParser):
    begins = (TOOL_CALLS,)
    other_marks = (ARGS, CALL_ID)
    ends_reasoning = True
    syntax = CallSyntax(
        before_name="[TOOL_CALLS]",
        before_arguments="[ARGS]",
        after_arguments="",
        arguments=JsonArguments(),
    )

    @staticmethod
    def random_id() -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LEN))

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(TOOL_CALLS)
        yield from self.lexer.space()
        first = yield from self.lexer.peek()
        if first == "[":
            yield from self._read_array()
        elif first == "{":
            yield from self.object_call()
        else:
            yield from self._read_named()

    def _read_array(self) -> Steps[None]:
        yield from self.lexer.expect("[")
        while True:
            yield from self.lexer.space()
            yield from self.object_call()
            yield from self.lexer.space()
            if not (yield from self.lexer.accept(",")):
                break
        yield from self.lexer.accept("]")

    def _read_named(self) -> Steps[None]:
        name = yield from self.lexer.name_before(_AFTER_NAME)
        id = None
        if (yield from self.lexer.accept(CALL_ID)):
            id = yield from self.lexer.name_before(_AFTER_ID)
        yield from self.lexer.expect(ARGS)
        yield from self.lexer.space()
        yield from self.json.call_arguments(name, id)
        self.end_call()


class MistralArrayParser(MistralParser):
    """The same, for models that were taught the array."""

    syntax = CallSyntax(
        opening="[TOOL_CALLS] [",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}",
        separator=", ",
        closing="]",
        arguments=JsonArguments(),
    )
