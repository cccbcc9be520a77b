"""Calls as Python writes them: `[f(a="x", b=2), g()]`, with a class of data for each family.

Values are literals of Python or of JSON; they leave as JSON. A quote ends a string only where the
call goes on as it must, because templates write strings into quotes without escaping them.
"""

from __future__ import annotations

import json
from typing import ClassVar

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.base import CallParser
from pippin.text.parsers.schema_types import argument_types, as_json, unquoted
from pippin.text.parsers.syntax import CallSyntax, KeywordArguments
from pippin.text.pieces import MAX_ARGUMENTS_DEPTH

_BARE_TYPES = frozenset({"number", "boolean", "null"})  # what is none of them is a string
_AFTER_NAME = Marks.of("(", *"[]{})\"'`,=<>|\n")
_AFTER_KEY = Marks.of("=", *"()[]{}\"',\n")
_AFTER_BARE = Marks.of(",", *")]}([{:\n\"'")
_ESCAPES = {
    **{char: json.dumps(char)[1:-1] for char in "\"'\\/"},
    **{char: "\\" + char for char in "nrtbf"},
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\n": "",
}
_NUM_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class PythonicParser(CallParser):
    """Calls in brackets or, where `begins` opens them, also without."""

    declared_only: ClassVar[bool] = False  # another name is no call

    def read_call(self) -> Steps[None]:
        yield from self.lexer.accept_any(self.begins)
        yield from self.read_calls()

    def read_calls(self) -> Steps[None]:
        yield from self.lexer.space()
        in_list = yield from self.lexer.accept("[")
        while True:
            yield from self._one_call()
            yield from self.lexer.space()
            if not (yield from self.lexer.accept(",")) and (in_list or (yield from self._at_end())):
                break
        if in_list:
            yield from self.lexer.accept("]")
        yield from self.lexer.space()
        yield from self.lexer.accept_any(self.ends)

    def _at_end(self) -> Steps[bool]:
        for end in self.ends:
            if (yield from self.lexer.is_next(end)):
                return True
        return (yield from self.lexer.ended())

    def _one_call(self) -> Steps[None]:
        name = yield from self.lexer.name_before(_AFTER_NAME)
        if not (yield from self.lexer.is_next("(")):
            raise Malformed
        if " " in name or (self.declared_only and name not in self.tools):
            raise Malformed
        yield from self.lexer.expect("(")
        self.sink.begin_call(name)
        self.sink.arguments("{")
        yield from self.lexer.space()
        is_first = True
        while not (yield from self.lexer.accept(")")):
            if not is_first:
                self.sink.arguments(", ")
            is_first = False
            key = yield from self.lexer.name_before(_AFTER_KEY)
            yield from self.lexer.expect("=")
            self.sink.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
            types = argument_types(self.tools.get(name), key)
            yield from self._value((",", ")"), MAX_ARGUMENTS_DEPTH, types)
            yield from self.lexer.space()
            if (yield from self.lexer.accept(",")):
                yield from self.lexer.space()
            elif not (yield from self.lexer.is_next(")")):
                raise Malformed
        self.sink.arguments("}")
        self.end_call()

    def _value(
        self, nexts: tuple[str, ...], depth: int, types: frozenset[str] = frozenset()
    ) -> Steps[None]:
        yield from self.lexer.space()
        first = yield from self.lexer.peek()
        if first in ("'", '"'):
            yield from unquoted(self.sink, self._string(first, nexts), types)
        elif first in _CLOSING:
            if not depth:
                raise Malformed
            yield from self._container(first, depth)
        else:
            text = yield from self.lexer.name_before(_AFTER_BARE)
            self.sink.arguments(as_json(text, _BARE_TYPES))

    def _container(self, opening: str, depth: int) -> Steps[None]:
        """A list, a tuple or a dict."""
        yield from self.lexer.expect(opening)
        closing, is_dict = _CLOSING[opening], opening == "{"
        self.sink.arguments("{" if is_dict else "[")
        yield from self.lexer.space()
        is_first = True
        while not (yield from self.lexer.accept(closing)):
            if not is_first:
                self.sink.arguments(", ")
            is_first = False
            if is_dict:
                yield from self._key()
            yield from self._value((",", closing), depth - 1)
            yield from self.lexer.space()
            if (yield from self.lexer.accept(",")):
                yield from self.lexer.space()
            elif not (yield from self.lexer.is_next(closing)):
                raise Malformed
        self.sink.arguments("}" if is_dict else "]")

    def _key(self) -> Steps[None]:
        quote = yield from self.lexer.peek()
        if quote in ("'", '"'):
            yield from self._string(quote, (":",))
        else:
            key = yield from self.lexer.name_before(_AFTER_BARE)
            self.sink.arguments(json.dumps(key, ensure_ascii=False))
        yield from self.lexer.space()
        yield from self.lexer.expect(":")
        self.sink.arguments(": ")

    def _string(self, quote: str, nexts: tuple[str, ...]) -> Steps[None]:
        yield from self.lexer.expect(quote)
        self.sink.arguments('"')
        marks = Marks.of(quote, "\\", *self.ends)
        while True:
            if text := (yield from self.lexer.text_before(marks)):
                self.sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            elif (yield from self.lexer.accept("\\")):
                yield from self._escape()
            elif (yield from self.lexer.is_followed(quote, nexts)):
                yield from self.lexer.expect(quote)
                self.sink.arguments('"')
                return
            else:
                for end in self.ends:
                    if (yield from self.lexer.is_followed(end, self.begins)):
                        raise Malformed  # the quote was never closed
                char = yield from self.lexer.char()
                self.sink.arguments(json.dumps(char, ensure_ascii=False)[1:-1])

    def _escape(self) -> Steps[None]:
        char = yield from self.lexer.char()
        if char not in _NUM_HEX:
            known = _ESCAPES.get(char)
            text = json.dumps("\\" + char, ensure_ascii=False)[1:-1] if known is None else known
            self.sink.arguments(text)
            return
        digits = ""
        for _ in range(_NUM_HEX[char]):
            digits += yield from self.lexer.char()
        if not set(digits) <= set("0123456789abcdefABCDEF") or int(digits, 16) > 0x10FFFF:
            raise Malformed
        if char == "U":
            self.sink.arguments(json.dumps(chr(int(digits, 16)))[1:-1])
        else:  # of a pair of surrogates each half comes alone
            self.sink.arguments(f"\\u{digits:0>4}")


def _syntax(opening: str, closing: str, separator: str = ", ") -> CallSyntax:
    return CallSyntax(
        opening=opening,
        before_name="",
        before_arguments="(",
        after_arguments=")",
        separator=separator,
        closing=closing,
        arguments=KeywordArguments(),
    )


class Lfm2Parser(PythonicParser):
    begins, ends = ("<|tool_call_start|>",), ("<|tool_call_end|>",)
    syntax = _syntax("<|tool_call_start|>[", "]<|tool_call_end|>")


class Olmo3Parser(PythonicParser):
    begins, ends = ("<function_calls>",), ("</function_calls>",)
    syntax = _syntax("<function_calls>", "</function_calls>", separator="\n")


class BarePythonicParser(PythonicParser):
    """Llama's and Gemma's: a list at the beginning of a reply, of functions that were declared."""

    begins, ends = ("<|python_start|>",), ("<|python_end|>",)
    declared_only = True
    syntax = _syntax("[", "]")

    def read_start(self) -> Steps[None]:
        yield from self.attempt(self._read_bare_calls)

    def may_be_markup(self, undecided: str) -> bool:
        """A bare list is, as long as its first name begins a declared one."""
        if undecided.startswith(self.begins) or self.sink.num_complete:
            return super().may_be_markup(undecided)
        bracket, _, calls = undecided.partition("[")
        name = calls.partition("(")[0].strip()
        return (
            "[" in undecided
            and not bracket.strip()
            and any(known.startswith(name) for known in self.tools)
        )

    def _read_bare_calls(self) -> Steps[None]:
        yield from self.lexer.space()
        if not (yield from self.lexer.is_next("[")):
            raise Malformed
        yield from self.read_calls()
