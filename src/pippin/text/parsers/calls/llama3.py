"""Llama 3: a reply that is `{"name": "f", "parameters": {...}}`, or one after `<|python_tag|>`.

Several calls are parted by semicolons, or by nothing (Llama 4). A bare object is a call only at the
beginning of a reply, and only of a function that was declared: any JSON answer looks much like it.
"""

from __future__ import annotations

import re

from pippin.text.lexer import Malformed, Steps
from pippin.text.parsers.json_calls import JsonCallParser
from pippin.text.parsers.syntax import CallSyntax, JsonArguments

PYTHON_TAG = "<|python_tag|>"
_FIRST_KEY = re.compile(r'\s*\{\s*"?([^"]*)')
_LAST_NAME = re.compile(r'"name"\s*:\s*"([^"]*)$')


class Llama3Parser(JsonCallParser):
    begins = (PYTHON_TAG,)
    syntax = CallSyntax(
        before_name='{"name": "',
        before_arguments='", "parameters": ',
        after_arguments="}",
        separator="; ",
        arguments=JsonArguments(),
    )

    def read_start(self) -> Steps[None]:
        yield from self.attempt(self._read_bare_calls)

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(PYTHON_TAG)
        yield from self._read_calls()

    def check_name(self, name: str) -> None:
        if name not in self.tools:
            raise Malformed

    def may_be_markup(self, undecided: str) -> bool:
        """A bare object is, as long as its first key is a call's and its name a declared one's."""
        if undecided.startswith(PYTHON_TAG) or self.sink.num_complete:
            return super().may_be_markup(undecided)
        key, name = _FIRST_KEY.match(undecided), _LAST_NAME.search(undecided)
        keys = (*self.name_keys, *self.arguments_keys, "type")
        return (
            key is not None
            and any(known.startswith(key[1]) for known in keys)
            and any(name is None or known.startswith(name[1]) for known in self.tools)
        )

    def _read_bare_calls(self) -> Steps[None]:
        yield from self.lexer.space()
        if (yield from self.lexer.peek()) != "{":
            raise Malformed
        yield from self._read_calls()

    def _read_calls(self) -> Steps[None]:
        while True:
            yield from self.lexer.space()
            yield from self.object_call(other_keys=("type",))
            yield from self.lexer.space()
            if not (yield from self.lexer.accept(";")) and not (yield from self.lexer.is_next("{")):
                return
