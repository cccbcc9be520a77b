"""Calls whose arguments stand bare between tags, converted to a JSON object. Knows no format.

A string is passed on as it arrives, any other value when it is complete and its type is known. Bare
text may contain the tags that end it. So a tag ends a value only if what follows it continues the
format; elsewhere it is text.
"""

from __future__ import annotations

import json
from typing import ClassVar

from pippin.text.lexer import Malformed, Marks, Steps
from pippin.text.parsers.base import CallParser
from pippin.text.parsers.schema_types import argument_types, as_json

STRING = frozenset({"string"})


class TaggedCallParser(CallParser):
    value_end: ClassVar[str]
    after_value: ClassVar[tuple[str, ...]]  # what may follow it, but for white space
    # Where a value also ends if its tag is missing: (what stands there, what must follow that).
    implied_ends: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()
    call_end: ClassVar[str]
    after_call: ClassVar[tuple[str, ...]]
    pads_values = False  # a line break before and one after each value are not part of it
    # What may stand right before a value that is a string, and the end that it then has.
    quotes: ClassVar[tuple[tuple[str, str], ...]] = ()

    def begin_call(self, name: str) -> None:
        """A function's name was read. It is passed on with its first argument, or its end."""
        self._name = name
        self._num_arguments = 0

    def finish_call(self) -> None:
        if not self._num_arguments:
            self.sink.begin_call(self._name)
        self.sink.arguments("}" if self._num_arguments else "{}")
        self.end_call()

    def argument(self, key: str, written_types: frozenset[str] | None = None) -> Steps[None]:
        """A value, up to and with its end tag; of the type that its tag says, or the schema."""
        if not self._num_arguments:
            self.sink.begin_call(self._name)
        before = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self.sink.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        types = written_types
        if types is None:
            types = argument_types(self.tools.get(self._name), key)
        self._end = self.value_end
        for quote, end in self.quotes:
            if (yield from self.lexer.accept(quote)):
                self._end = end
        if types == STRING:
            yield from self._stream_string()
        else:
            self.sink.arguments(as_json((yield from self._whole_value()), types))

    def _stream_string(self) -> Steps[None]:
        self.sink.arguments('"')
        value = _Unpadded() if self.pads_values else None
        while (text := (yield from self._value_text())) is not None:
            text = value.add(text) if value else text
            self.sink.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        self.sink.arguments('"')

    def _whole_value(self) -> Steps[str]:
        value = _Unpadded() if self.pads_values else None
        chunks = []
        while (text := (yield from self._value_text())) is not None:
            chunks.append(value.add(text) if value else text)
        return "".join(chunks)

    def _value_text(self) -> Steps[str | None]:
        """The next part of a value; None once its end has been taken."""
        implied = (mark for mark, _ in self.implied_ends)
        ends = Marks.of(self._end, self.call_end, *implied)
        if text := (yield from self.lexer.text_before(ends)):
            return self.lexer.without_cut_mark(text, ends)
        if (yield from self.lexer.is_followed(self._end, self.after_value)):
            yield from self.lexer.expect(self._end)
            return None
        for mark, nexts in self.implied_ends:
            if (yield from self.lexer.is_followed(mark, nexts)):
                return None
        if (yield from self.lexer.is_followed(self.call_end, self.after_call)):
            raise Malformed
        return (yield from self.lexer.char())  # only text, or Malformed at the end


class _Unpadded:
    """A value in parts, without a line break at its beginning and one at its end."""

    def __init__(self) -> None:
        self._at_start = True
        self._held = ""

    def add(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")
