"""Calls whose arguments are JSON, passed on as they arrive.

Inside a string a format's marks are only text. But a string that the model did not close must not
include the next call: an end mark inside a string ends the call if another call, or the end of the
reply, follows it.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Container, Iterable, Sequence
from functools import cached_property
from typing import Any, NoReturn

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.base import MARK, CallParser
from pippin.text.pieces import MAX_ARGUMENTS_DEPTH

# Models write line breaks into strings as they are; JSON wants them escaped.
_CONTROLS = {code: json.dumps(chr(code))[1:-1] for code in range(0x20)}


_KEYS = (("name",), ("arguments", "parameters"))  # of a name, of its arguments


class JsonReader:
    """Reads JSON from a parser's text, and writes a call's arguments to its sink."""

    def __init__(
        self, parser: CallParser, ends: Sequence[str] = (), next_marks: Sequence[str] = ()
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
            _as_object((yield from self._object(self._parser.sink.arguments)))
            return
        if first != '"':  # nothing else may stand here: the next call might be part of it
            yield from self._lexer.expect("null")
        arguments = "{}" if first != '"' else _as_object((yield from self.value()))
        self._parser.sink.begin_call(name, id)
        self._parser.sink.arguments(arguments)

    def string(self) -> Steps[str]:
        """A string's value."""
        if (yield from self._lexer.peek()) != '"':
            raise Malformed
        return str(parse_json((yield from self.value())))

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

    def call(
        self,
        keys: tuple[tuple[str, ...], tuple[str, ...]] = _KEYS,
        *,
        other_keys: Iterable[str] | None = None,
        names: Container[str] | None = None,
    ) -> Steps[None]:
        """`{"name": ..., "arguments": ...}`, in any order; a last brace may be missing.

        Other keys are skipped. Where `other_keys` or `names` are given, any further one is
        malformed.
        """
        lexer, sink = self._lexer, self._parser.sink
        name_keys, arguments_keys = keys
        yield from lexer.expect("{")
        name: str | None = None
        held: str | None = None  # arguments that stood before the name
        is_called = False
        while not is_called or (yield from self._has_more_members()):
            key = yield from self._member_key()
            if key in name_keys:
                name = yield from self.string()
                if not name or (names is not None and name not in names):
                    raise Malformed
            elif key in arguments_keys:
                if held is not None or is_called:
                    raise Malformed
                if name is not None:
                    yield from self.call_arguments(name)
                    is_called = True
                else:
                    held = yield from self.value()
            elif other_keys is not None and key not in other_keys:
                raise Malformed
            else:
                yield from self.value()
            yield from lexer.space()
            if not is_called and not (yield from lexer.accept(",")):
                yield from lexer.expect("}")
                break
        if not is_called:
            if name is None:
                raise Malformed
            arguments = _as_object("null" if held is None else held)
            sink.begin_call(name)
            sink.arguments(arguments)
        self._parser.end_call()

    def named_call(self) -> Steps[None]:
        """`{"f": {...}}`; the last brace may be missing."""
        yield from self._lexer.expect("{")
        name = yield from self._member_key()
        if not name:
            raise Malformed
        yield from self.call_arguments(name)
        yield from self._lexer.space()
        yield from self._lexer.accept("}")
        self._parser.end_call()

    def _member_key(self) -> Steps[str]:
        yield from self._lexer.space()
        key = yield from self.string()
        yield from self._lexer.space()
        yield from self._lexer.expect(":")
        yield from self._lexer.space()
        return key

    def _has_more_members(self) -> Steps[bool]:
        """After the arguments the call stands, whatever follows: a missing brace is forgiven."""
        if (yield from self._lexer.accept(",")):
            return True
        yield from self._lexer.accept("}")
        return False


class JsonCallParser(CallParser):
    """BEGIN {"name": "f", "arguments": {...}} END, or BEGIN [{...}, {...}] END: every family is
    read in all of these ways."""

    def read_format(self) -> None:
        self.json = JsonReader(self, self.format.ends, self.format.next_marks)
        keys = re.findall(r'"(\w+)": "?\{(?:name|arguments)\}', self.format.call)
        self._keys = _KEYS if keys[:1] in ([], ["name"]) else ((keys[0],), (keys[1],))
        self._name_is_key = '"{name}": {arguments}' in self.format.call

    def read_call(self) -> Steps[None]:
        yield from self.lexer.accept_any(self.format.begins)
        yield from self.lexer.space()
        yield from self.read_objects()
        yield from self.lexer.space()
        yield from self.lexer.accept_any(self.format.ends)

    def read_objects(self) -> Steps[None]:
        yield from self.lexer.accept("[")
        while True:
            yield from self.lexer.space()
            yield from self.read_object()
            yield from self.lexer.space()
            while (yield from self.lexer.accept("}")):  # one too many is a common slip
                yield from self.lexer.space()
            if not (yield from self.lexer.accept(",")) and (yield from self.lexer.peek()) != "{":
                break
        yield from self.lexer.accept("]")

    def read_object(self) -> Steps[None]:
        if self._name_is_key:
            yield from self.json.named_call()
        else:
            yield from self.json.call(self._keys)


class MistralParser(JsonCallParser):
    """An array of objects, or `name[ARGS]{...}` for each call."""

    @staticmethod
    def random_id() -> str:
        """Letters and digits: Mistral's templates refuse any other id."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def read_call(self) -> Steps[None]:
        yield from self.lexer.accept_any(self.format.begins)
        yield from self.lexer.space()
        if (yield from self.lexer.peek()) in ("[", "{"):
            yield from self.read_objects()
            return
        name = yield from self.lexer.name_before(Marks.of("[ARGS]", "[CALL_ID]", "\n", "{"))
        id = None
        if (yield from self.lexer.accept("[CALL_ID]")):
            id = yield from self.lexer.name_before(Marks.of("[ARGS]", "\n", "{"))
        yield from self.lexer.expect("[ARGS]")
        yield from self.lexer.space()
        yield from self.json.call_arguments(name, id)
        self.end_call()


class NamedJsonParser(JsonCallParser):
    """BEGIN f SEPARATOR {...} END.

    Kimi K2's name is an id, `functions.f:number`, which must come back as the model wrote it.
    DeepSeek V3 and R1 have the name behind the separator, and a JSON code block.
    """

    has_section = True
    _ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")

    def read_call(self) -> Steps[None]:
        (begin,), (end,) = self.format.begins, self.format.ends
        separator = MARK.findall(self.format.call)[-2]
        yield from self.lexer.expect(begin)
        name = yield from self.lexer.name_before(Marks.of(separator, end, "\n"))
        yield from self.lexer.space()
        yield from self.lexer.expect(separator)
        yield from self.lexer.space()
        id = None
        if "{number}" in self.format.call and (found := self._ID.fullmatch(name)):
            name, id = found["name"], name
        is_block = id is None and (yield from self.lexer.peek()) not in ("{", '"')
        if is_block:
            name = yield from self.lexer.name_before(Marks.of("\n", "`", end))
            yield from self.lexer.space()
            yield from self.lexer.expect("```json")
            yield from self.lexer.space()
        yield from self.json.call_arguments(name, id)
        if is_block:
            yield from self.lexer.space()
            yield from self.lexer.accept("```")
        self.end_call()
        yield from self.lexer.space()
        yield from self.lexer.accept(end)


class Llama3Parser(JsonCallParser):
    """A reply that is `{"name": "f", "parameters": {...}}`, or one after `<|python_tag|>`.

    Several calls are parted by semicolons, or by nothing (Llama 4). A bare object is a call only at
    the beginning of a reply, and only of a function that was declared: any JSON answer looks much
    like it.
    """

    _FIRST_KEY = re.compile(r'\s*\{\s*"?([^"]*)')
    _LAST_NAME = re.compile(r'"name"\s*:\s*"([^"]*)$')

    def read_start(self) -> Steps[None]:
        yield from self.attempt(self.read_objects)

    def read_call(self) -> Steps[None]:
        yield from self.lexer.accept_any(self.format.begins)
        yield from self.read_objects()

    def read_objects(self) -> Steps[None]:
        while True:
            yield from self.lexer.space()
            yield from self.json.call(other_keys=("type",), names=self.tools)
            yield from self.lexer.space()
            if not (yield from self.lexer.accept(";")) and not (yield from self.lexer.is_next("{")):
                return

    def may_be_call(self, undecided: str) -> bool:
        """A bare object is, as long as its first key is a call's and its name a declared one's."""
        if self.sink.num_complete:
            return True
        key, name = self._FIRST_KEY.match(undecided), self._LAST_NAME.search(undecided)
        return (
            key is not None
            and any(known.startswith(key[1]) for known in (*_KEYS[0], *_KEYS[1], "type"))
            and any(name is None or known.startswith(name[1]) for known in self.tools)
        )


# Of Harmony: how the prompt ends, how a message goes over into the next one, and what may begin it.
REPLY_BEGINS = "<|start|>assistant"
NEXT_MESSAGE = f"<|end|>{REPLY_BEGINS}"
ANALYSIS, COMMENTARY, FINAL = (
    f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final")
)


class HarmonyParser(JsonCallParser):
    """Harmony (gpt-oss): messages on channels, where other formats have text with calls in it.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

    Analysis is reasoning, final and commentary are content; a message `to=functions.f` is a call. A
    reply begins in a message's header: the prompt ends with `<|start|>assistant`.
    """

    _RECIPIENT = re.compile(r"\bto=(?:functions\.)?(\S+)")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

    @cached_property
    def _marks(self) -> Marks:
        return Marks.of(*sorted(self.marks))

    def read_reply(self) -> Steps[None]:
        if (yield from self.lexer.is_next(" to=")):
            yield from self.attempt(self.read_call)
        while not (yield from self.lexer.ended()):
            if text := (yield from self.lexer.text_before(self._marks)):
                self.sink.content(text)
                continue
            for begin in self.format.begins:
                if (yield from self.lexer.is_next(begin)):
                    yield from self.attempt(self.read_call)
                    break
            else:
                yield from self.lexer.accept_any(self.marks)  # the end of a message

    def read_call(self) -> Steps[None]:
        """One message, whatever it is."""
        header = yield from self._read_header()
        if recipient := self._RECIPIENT.search(header):
            yield from self.lexer.space()
            yield from self.json.call_arguments(recipient[1])
            self.end_call()
            return
        self.lexer.record()  # the header is no text
        channel = self._CHANNEL.search(header)
        self.in_reasoning = channel is not None and channel[1] == "analysis"
        while text := (yield from self.lexer.text_before(self._marks)):
            (self.sink.reasoning if self.in_reasoning else self.sink.content)(text)
            self.lexer.record()
        self.in_reasoning = False

    def _read_header(self) -> Steps[str]:
        yield from self.lexer.accept("<|start|>")
        header = ""
        while not (yield from self.lexer.accept("<|message|>")):
            if text := (yield from self.lexer.text_before(self._marks)):
                header += text
            elif mark := (yield from self.lexer.accept_any(("<|channel|>", "<|constrain|>"))):
                header += " " + mark
            else:
                raise Malformed
        return header


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


def is_json(text: str) -> bool:
    try:
        parse_json(text)
    except Malformed:
        return False
    return True


def _as_object(text: str) -> str:
    """An object's text; from that of a string, its value; of null, an empty one."""
    text = str(parse_json(text)) if text.startswith('"') else "{}" if text == "null" else text
    if not isinstance(parse_json(text), dict):
        raise Malformed
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
