"""Calls whose arguments are JSON, passed on as they arrive. Knows the marks of no format.

Inside a string a format's marks are only text. But a string that the model did not close must not
include the next call: an end mark inside a string ends the call if another call, or the end of the
reply, follows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.base import CallParser, LexedParser, Tool
from pippin.text.pieces import MAX_ARGUMENTS_DEPTH

# Models write line breaks into strings as they are; JSON wants them escaped.
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}


class JsonReader:
    """Reads JSON from a parser's text, and writes a call's arguments to its sink."""

    def __init__(
        self, parser: LexedParser, ends: Sequence[str] = (), next_marks: Sequence[str] = ()
    ) -> None:
        self._parser = parser
        self._lexer = parser.lexer
        self._ends = tuple(ends)
        self._next_marks = tuple(next_marks)
        self._in_string = Marks.of('"', "\\", *ends)
        marks = [mark for mark in (*ends, *next_marks) if mark[0] not in "[{"]  # brackets anyway
        self._outside = Marks.of('"', *"{}[]", *marks)

    def call_arguments(self, name: str, id: str | None = None) -> Steps[None]:
        """An object, or an object's text as a string, or null. Opens the call before the first."""
        first = yield from self._lexer.peek()
        if first == "{":
            self._parser.sink.begin_call(name, id)
            text = yield from self._object(self._parser.sink.arguments)
            if not is_object(text):
                raise Malformed
            return
        held = "{}"
        if first == '"':
            held = yield from self.string()
        else:
            yield from self._lexer.expect("null")
        if not is_object(held):
            raise Malformed
        self._parser.sink.begin_call(name, id)
        self._parser.sink.arguments(held)

    def string(self) -> Steps[str]:
        """A string's value."""
        yield from self._lexer.expect('"')
        chunks: list[str] = []
        yield from self._rest_of_string(chunks.append)
        value = parse_json('"' + "".join(chunks))
        assert isinstance(value, str)
        return value

    def value(self) -> Steps[str]:
        """Any value's text, when it is complete."""
        chunks: list[str] = []
        first = yield from self._lexer.peek()
        if first in ("{", "["):
            return (yield from self._object(chunks.append))
        if first == '"':
            yield from self._lexer.expect('"')
            yield from self._rest_of_string(chunks.append)
            return '"' + "".join(chunks)
        while text := (yield from self._lexer.text_before(_AFTER_LITERAL)):
            chunks.append(text)
        return "".join(chunks)

    def _object(self, emit: Callable[[str], None]) -> Steps[str]:
        """From an opening bracket to the one that closes it."""
        chunks: list[str] = []

        def pass_on(text: str) -> None:
            chunks.append(text)
            emit(text)

        depth = 0
        while True:
            if text := (yield from self._lexer.text_before(self._outside)):
                pass_on(text)
                continue
            bracket = yield from self._lexer.accept_any('"{}[]')
            if bracket is None:  # a mark, or the end
                raise Malformed
            pass_on(bracket)
            if bracket == '"':
                yield from self._rest_of_string(pass_on)
            else:
                depth += 1 if bracket in "{[" else -1
                if depth > MAX_ARGUMENTS_DEPTH:
                    raise Malformed
            if depth == 0:
                return "".join(chunks)

    def _rest_of_string(self, emit: Callable[[str], None]) -> Steps[None]:
        while True:
            if text := (yield from self._lexer.text_before(self._in_string)):
                emit(text.translate(_CONTROLS))
            elif (yield from self._lexer.accept('"')):
                emit('"')
                return
            elif (yield from self._lexer.accept("\\")):
                emit("\\" + (yield from self._lexer.char()))
            else:
                for end in self._ends:
                    if (yield from self._lexer.is_followed(end, self._next_marks)):
                        raise Malformed
                emit((yield from self._lexer.char()))


class JsonCallParser(CallParser):
    """Formats whose calls, or at least their arguments, are JSON objects."""

    name_keys: ClassVar[tuple[str, ...]] = ("name",)
    arguments_keys: ClassVar[tuple[str, ...]] = ("arguments", "parameters")
    next_marks: ClassVar[tuple[str, ...]] = ()  # what may follow then, but for white space

    def __init__(self, tools: Sequence[Tool] = (), new_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, new_id)
        self.json = JsonReader(self, self.ends, self.next_marks)

    def object_call(self, other_keys: Iterable[str] | None = None) -> Steps[None]:
        """`{"name": ..., "arguments": ...}`, in any order; a last brace may be missing.

        Other keys are skipped. Where `other_keys` names some, any further one is malformed.
        """
        yield from self.lexer.expect("{")
        name: str | None = None
        held: str | None = None  # arguments that stood before the name
        is_called = False
        while not is_called or (yield from self._has_more_members()):
            yield from self.lexer.space()
            key = yield from self.json.string()
            yield from self.lexer.space()
            yield from self.lexer.expect(":")
            yield from self.lexer.space()
            if key in self.name_keys:
                name = yield from self.json.string()
                self.check_name(name)
            elif key in self.arguments_keys and name is not None and held is None and not is_called:
                yield from self.json.call_arguments(name)
                is_called = True
            elif key in self.arguments_keys and held is None and not is_called:
                held = yield from self.json.value()
            elif key in self.arguments_keys or not (other_keys is None or key in other_keys):
                raise Malformed
            else:
                yield from self.json.value()
            yield from self.lexer.space()
            if not is_called and not (yield from self.lexer.accept(",")):
                yield from self.lexer.expect("}")
                break
        if not is_called:
            self._call_with(name, held)
        self.end_call()

    def check_name(self, name: str) -> None:
        """Raise, if no call can have this name."""
        if not name:
            raise Malformed

    def _has_more_members(self) -> Steps[bool]:
        """After the arguments the call stands, whatever follows: a missing brace is forgiven."""
        if (yield from self.lexer.accept(",")):
            return True
        yield from self.lexer.accept("}")
        return False

    def _call_with(self, name: str | None, held: str | None) -> None:
        if name is None:
            raise Malformed
        arguments = "{}" if held is None or held == "null" else held
        if arguments.startswith('"'):
            value = parse_json(arguments)
            arguments = value if isinstance(value, str) else ""
        if not is_object(arguments):
            raise Malformed
        self.sink.begin_call(name)
        self.sink.arguments(arguments)


_AFTER_LITERAL = Marks.of(",", "}", "]", " ", "\n", "\r", "\t")


def parse_json(text: str) -> Any:
    """A value without regard to the size of numbers; Malformed if it is none or too deep."""
    try:
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    level, depth = _containers([value]), 1
    while level:
        if depth > MAX_ARGUMENTS_DEPTH:
            raise Malformed
        level, depth = [each for outer in level for each in _containers(outer)], depth + 1
    return value


def _containers(value: Any) -> list[Any]:
    """Those directly inside an object or an array."""
    inner = value.values() if isinstance(value, dict) else value
    return [each for each in inner if isinstance(each, dict | list)]


def is_object(text: str) -> bool:
    try:
        return isinstance(parse_json(text), dict)
    except Malformed:
        return False


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
