"""FunctionGemma and Gemma 4: `call:f{key:value}` between marks, with a mark of its own for quotes.

Gemma 3 has no format of its own (its `tool_code` blocks are what a prompt asks for): none is read.
"""

from __future__ import annotations

import json
from typing import ClassVar

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.base import CallParser
from pippin.text.parsers.schema_types import argument_types, as_json, unquoted
from pippin.text.parsers.syntax import BareKeyArguments, CallSyntax
from pippin.text.pieces import MAX_ARGUMENTS_DEPTH

_BARE_TYPES = frozenset({"number", "boolean", "null"})  # strings are always quoted
_CLOSING = {"{": "}", "[": "]"}
_AFTER_BARE = Marks.of(",", "}", "]", "\n")
_AFTER_KEY = Marks.of(":", "{", "}", "\n")


class GemmaParser(CallParser):
    """What the two share; the marks differ."""

    begin: ClassVar[str]
    end: ClassVar[str]
    quote: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.begins = (cls.begin,)
        cls.other_marks = (cls.end, cls.quote)
        cls.syntax = CallSyntax(
            before_name=f"{cls.begin}call:",
            before_arguments="",
            after_arguments=cls.end,
            arguments=BareKeyArguments(cls.quote),
        )

    def read_call(self) -> Steps[None]:
        yield from self.lexer.expect(self.begin)
        yield from self.lexer.space()
        yield from self.lexer.expect("call:")
        name = yield from self.lexer.name_before(_AFTER_KEY)
        if not (yield from self.lexer.is_next("{")):
            raise Malformed
        self.sink.begin_call(name)
        yield from self._container("{", "}", MAX_ARGUMENTS_DEPTH, name)
        self.end_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(self.end)

    def _container(self, opening: str, closing: str, depth: int, function: str = "") -> Steps[None]:
        """An object, or an array. That of a call's arguments is a function's."""
        yield from self._bracket(opening)
        yield from self.lexer.space()
        if (yield from self.lexer.accept(closing)):
            self.sink.arguments(closing)
            return
        types: frozenset[str] = frozenset()
        while True:
            if opening == "{":
                yield from self.lexer.space()
                key = yield from self._key()
                yield from self.lexer.expect(":")
                self.sink.arguments(": ")
                types = argument_types(self.tools.get(function), key)
            yield from self._value(depth - 1, types)
            yield from self.lexer.space()
            if not (yield from self.lexer.accept(",")):
                yield from self._bracket(closing)
                return
            self.sink.arguments(", ")

    def _bracket(self, bracket: str) -> Steps[None]:
        yield from self.lexer.expect(bracket)
        self.sink.arguments(bracket)

    def _key(self) -> Steps[str]:
        if (yield from self.lexer.is_next(self.quote)):
            yield from self._string()
            return ""
        key = yield from self.lexer.name_before(_AFTER_KEY)
        self.sink.arguments(json.dumps(key, ensure_ascii=False))
        return key

    def _value(self, depth: int, types: frozenset[str]) -> Steps[None]:
        if not depth:
            raise Malformed
        yield from self.lexer.space()
        if (yield from self.lexer.is_next(self.quote)):
            yield from unquoted(self.sink, self._string(), types)
            return
        first = yield from self.lexer.peek()
        if first in _CLOSING:
            yield from self._container(first, _CLOSING[first], depth)
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


class Gemma4Parser(GemmaParser):
    begin, end, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
