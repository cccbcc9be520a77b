"""FunctionGemma and Gemma 4: `call:f{key:value}` between marks, with a mark of its own for quotes.

Gemma 3 has no format of its own (its `tool_code` blocks are what a prompt asks for): none is read.
"""

from __future__ import annotations

import json
from typing import ClassVar

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.base import CallParser
from pippin.text.parsers.schema_types import as_json
from pippin.text.parsers.syntax import BareKeyArguments, CallSyntax

MAX_DEPTH = 64
_BARE_TYPES = frozenset({"number", "boolean", "null"})  # strings are always quoted
_AFTER_BARE = Marks.of(",", "}", "]", "\n")
_AFTER_KEY = Marks.of(":", "{", "}", "\n")


class GemmaParser(CallParser):
    """What the two share; the marks differ."""

    begin: ClassVar[str]
    end: ClassVar[str]
    quote: ClassVar[str]

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(self.begin)
        yield from self.lexer.space()
        yield from self.lexer.expect("call:")
        name = yield from self.lexer.name_before(_AFTER_KEY)
        if not (yield from self.lexer.is_next("{")):
            raise Malformed
        self.sink.begin_call(name)
        yield from self._object(MAX_DEPTH)
        self.end_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(self.end)

    def _object(self, depth: int) -> Steps[None]:
        yield from self._bracket("{")
        yield from self.lexer.space()
        if (yield from self.lexer.accept("}")):
            self.sink.arguments("}")
            return
        while True:
            yield from self.lexer.space()
            yield from self._key()
            yield from self.lexer.expect(":")
            self.sink.arguments(": ")
            yield from self._value(depth - 1)
            if not (yield from self._goes_on("}")):
                return

    def _array(self, depth: int) -> Steps[None]:
        yield from self._bracket("[")
        yield from self.lexer.space()
        if (yield from self.lexer.accept("]")):
            self.sink.arguments("]")
            return
        while True:
            yield from self._value(depth - 1)
            if not (yield from self._goes_on("]")):
                return

    def _goes_on(self, close: str) -> Steps[bool]:
        yield from self.lexer.space()
        if (yield from self.lexer.accept(",")):
            self.sink.arguments(", ")
            return True
        yield from self._bracket(close)
        return False

    def _bracket(self, bracket: str) -> Steps[None]:
        yield from self.lexer.expect(bracket)
        self.sink.arguments(bracket)

    def _key(self) -> Steps[None]:
        if (yield from self.lexer.is_next(self.quote)):
            yield from self._string()
        else:
            key = yield from self.lexer.name_before(_AFTER_KEY)
            self.sink.arguments(json.dumps(key, ensure_ascii=False))

    def _value(self, depth: int) -> Steps[None]:
        if not depth:
            raise Malformed
        yield from self.lexer.space()
        if (yield from self.lexer.is_next(self.quote)):
            yield from self._string()
            return
        first = yield from self.lexer.peek()
        if first == "{":
            yield from self._object(depth)
        elif first == "[":
            yield from self._array(depth)
        else:
            text = yield from self.lexer.name_before(_AFTER_BARE)
            self.sink.arguments(as_json(text, _BARE_TYPES))

    def _string(self) -> Steps[None]:
        yield from self.lexer.expect(self.quote)
        self.sink.arguments('"')
        marks = Marks.of(self.quote, self.end)
        while not (yield from self.lexer.accept(self.quote)):
            if text := (yield from self.lexer.text_before(marks)):
                self.sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            elif (yield from self.lexer.is_followed(self.end, self.begins)):
                raise Malformed  # the quote was never closed
            elif not (yield from self.lexer.is_next(self.quote)):
                self.sink.arguments((yield from self.lexer.char()))
        self.sink.arguments('"')


class FunctionGemmaParser(GemmaParser):
    begin, end, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    begins = (begin,)
    other_marks = (end, quote)
    syntax = CallSyntax(
        before_name="<start_function_call>call:",
        before_arguments="",
        after_arguments="<end_function_call>",
        arguments=BareKeyArguments(quote="<escape>"),
    )


class Gemma4Parser(GemmaParser):
    begin, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    begins = (begin,)
    other_marks = (end, quote)
    syntax = CallSyntax(
        before_name="<|tool_call>call:",
        before_arguments="",
        after_arguments="<tool_call|>",
        arguments=BareKeyArguments(quote='<|"|>'),
    )
