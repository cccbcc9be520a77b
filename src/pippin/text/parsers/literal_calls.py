"""Calls whose arguments are written as literals of a programming language; they leave as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.base import CallParser
from pippin.text.parsers.schema_types import argument_types, as_json, escaped, unquoted
from pippin.text.pieces import MAX_ARGUMENTS_DEPTH

_BARE_TYPES = frozenset({"number", "boolean", "null"})  # what is none of them is a string
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {
    **{char: json.dumps(char)[1:-1] for char in "\"'\\/"},
    **{char: "\\" + char for char in "nrtbf"},
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
    "\n": "",
}
_NUM_HEX = {"x": 2, "u": 4, "U": 8}


class LiteralCallParser(CallParser):
    quotes: tuple[str, ...]
    has_escapes = False  # in strings; then also quotes as they are
    after_bare: Marks  # where a value without quotes ends
    after_key: Marks

    def string(self, quote: str, nexts: tuple[str, ...]) -> Steps[None]:
        """A string; one of `nexts` must follow it, where quotes may stand in strings."""
        yield from self.lexer.expect(quote)
        self.sink.arguments('"')
        escape = "\\" if self.has_escapes else ""
        marks = Marks.of(quote, *escape, *self.format.ends)
        lexer = self.lexer
        while not (yield from lexer.is_followed(quote, nexts) if escape else lexer.is_next(quote)):
            if text := (yield from self.lexer.text_before(marks)):
                self.sink.arguments(escaped(text))
            elif escape and (yield from self.lexer.accept(escape)):
                yield from self._escape()
            else:
                for end in self.format.ends:
                    if (yield from self.lexer.is_followed(end, self.format.begins)):
                        raise Malformed  # the quote was never closed
                self.sink.arguments(escaped((yield from self.lexer.char())))
        yield from self.lexer.expect(quote)
        self.sink.arguments('"')

    def _escape(self) -> Steps[None]:
        char = yield from self.lexer.char()
        if char not in _NUM_HEX:
            known = _ESCAPES.get(char)
            text = escaped("\\" + char) if known is None else known
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

    def items(
        self,
        closing: str,
        read_key: Callable[[], Steps[str]] | None = None,
        *,
        depth: int = MAX_ARGUMENTS_DEPTH,
        function: str = "",
    ) -> Steps[None]:
        """Values up to a bracket, behind keys where they have some; those of a call have types."""
        yield from self.lexer.space()
        before = ""
        while not (yield from self.lexer.accept(closing)):
            self.sink.arguments(before)
            before = ", "
            types: frozenset[str] = frozenset()
            if read_key is not None:
                key = yield from read_key()
                types = argument_types(self.tools.get(function), key)
            yield from self._value((",", closing), depth, types)
            yield from self.lexer.space()
            if (yield from self.lexer.accept(",")):
                yield from self.lexer.space()
            elif not (yield from self.lexer.is_next(closing)):
                raise Malformed

    def dict_key(self) -> Steps[str]:
        key = ""
        for quote in self.quotes:
            if (yield from self.lexer.is_next(quote)):
                yield from self.string(quote, (":",))
                break
        else:
            key = yield from self.lexer.name_before(self.after_key)
            self.sink.arguments(json.dumps(key, ensure_ascii=False))
        yield from self.lexer.space()
        yield from self.lexer.expect(":")
        self.sink.arguments(": ")
        return key

    def _value(self, nexts: tuple[str, ...], depth: int, types: frozenset[str]) -> Steps[None]:
        yield from self.lexer.space()
        for quote in self.quotes:
            if (yield from self.lexer.is_next(quote)):
                yield from unquoted(self.sink, self.string(quote, nexts), types)
                return
        first = yield from self.lexer.peek()
        if first not in _CLOSING:
            text = yield from self.lexer.name_before(self.after_bare)
            self.sink.arguments(as_json(text, _BARE_TYPES))
            return
        if not depth:
            raise Malformed
        yield from self.lexer.expect(first)
        is_dict = first == "{"
        self.sink.arguments("{" if is_dict else "[")
        read_key = self.dict_key if is_dict else None
        yield from self.items(_CLOSING[first], read_key, depth=depth - 1)
        self.sink.arguments("}" if is_dict else "]")


class GemmaParser(LiteralCallParser):
    """FunctionGemma and Gemma 4: `call:f{key:value}` between marks, with a mark for quotes.

    Gemma 3 has no format of its own (its `tool_code` blocks are what a prompt asks for).
    """

    style = "bare_keys"
    after_bare = Marks.of(",", "}", "]", "\n")
    after_key = Marks.of(":", "{", "}", "\n")

    def read_format(self) -> None:
        self.quotes = (self.format.quote,)

    def read_call(self) -> Steps[None]:
        yield from self.lexer.accept_any(self.format.begins)
        yield from self.lexer.space()
        yield from self.lexer.expect("call:")
        name = yield from self.lexer.name_before(self.after_key)
        if not (yield from self.lexer.is_next("{")):
            raise Malformed
        self.sink.begin_call(name)
        yield from self.lexer.expect("{")
        self.sink.arguments("{")
        yield from self.items("}", self.dict_key, function=name)
        self.sink.arguments("}")
        self.end_call()
        yield from self.lexer.space()
        yield from self.lexer.accept_any(self.format.ends)


class PythonicParser(LiteralCallParser):
    """Calls as Python writes them: `[f(a="x", b=2), g()]`; behind a mark also without brackets.

    A quote ends a string only where the call goes on as it must, because templates write strings
    into quotes without escaping them.
    """

    style = "keywords"
    quotes = ("'", '"')
    has_escapes = True
    after_bare = after_key = Marks.of(",", *")]}([{:\n\"'")
    declared_only = False  # another name is no call

    def read_call(self) -> Steps[None]:
        yield from self.lexer.accept_any(self.format.begins)
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
        yield from self.lexer.accept_any(self.format.ends)

    def _at_end(self) -> Steps[bool]:
        for end in self.format.ends:
            if (yield from self.lexer.is_next(end)):
                return True
        return (yield from self.lexer.ended())

    def _one_call(self) -> Steps[None]:
        name = yield from self.lexer.name_before(Marks.of("(", *"[]{})\"'`,=<>|\n"))
        if not (yield from self.lexer.is_next("(")):
            raise Malformed
        if " " in name or (self.declared_only and name not in self.tools):
            raise Malformed
        yield from self.lexer.expect("(")
        self.sink.begin_call(name)
        self.sink.arguments("{")
        yield from self.items(")", self._keyword, function=name)
        self.sink.arguments("}")
        self.end_call()

    def _keyword(self) -> Steps[str]:
        key = yield from self.lexer.name_before(Marks.of("=", *"()[]{}\"',\n"))
        yield from self.lexer.expect("=")
        self.sink.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
        return key


class BarePythonicParser(PythonicParser):
    """Llama's and Gemma's: a list at the beginning of a reply, of functions that were declared."""

    declared_only = True

    def read_start(self) -> Steps[None]:
        yield from self.attempt(self._read_bare_calls)

    def may_be_call(self, undecided: str) -> bool:
        """A bare list is, as long as its first name begins a declared one."""
        if self.sink.num_complete:
            return True
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
