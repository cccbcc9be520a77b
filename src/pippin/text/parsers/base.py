"""What every parser of replies offers, and what those of tool calls share. Knows no format.

A call that turns out to be malformed becomes content, exactly as it was written, from where it
began to the error. Reading continues there, so that the next call is found.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pippin.text.lexer import Lexer, Malformed, Marks, Steps
from pippin.text.parsers.sink import PieceSink
from pippin.text.parsers.syntax import CallSyntax
from pippin.text.pieces import Content, TextPiece

Tool = Mapping[str, Any]  # as clients declare them: {"type": "function", "function": {...}}


class ReplyParser(ABC):
    """One reply's text in, its pieces out."""

    marks: frozenset[str] = frozenset()  # special tokens in them must reach it as text
    in_reasoning: bool = False  # whether the next text is reasoning, as far as is known

    @abstractmethod
    def feed(self, text: str) -> list[TextPiece]: ...

    @abstractmethod
    def close(self) -> list[TextPiece]:
        """The reply is finished: return what was held back."""

    @abstractmethod
    def cut(self) -> list[TextPiece]:
        """`max_tokens` cut the reply short. What was held back may be markup, and is dropped."""

    @property
    @abstractmethod
    def num_held(self) -> int:
        """Characters that have been fed and not been decided upon."""


class PlainText(ReplyParser):
    """All is content."""

    def feed(self, text: str) -> list[TextPiece]:
        return [Content(text)] if text else []

    def close(self) -> list[TextPiece]:
        return []

    def cut(self) -> list[TextPiece]:
        return []

    @property
    def num_held(self) -> int:
        return 0


class LexedParser(ReplyParser):
    """A parser that is one reader of the reply's text."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.lexer = Lexer()
        self.sink = PieceSink(new_id)
        self._steps = self.read_reply()

    @abstractmethod
    def read_reply(self) -> Steps[None]:
        """Read to the end, putting pieces into the sink."""

    def feed(self, text: str) -> list[TextPiece]:
        self.lexer.feed(text)
        next(self._steps, None)
        return self.sink.take()

    def close(self) -> list[TextPiece]:
        self.lexer.close()
        next(self._steps, None)
        self.sink.close()
        return self.sink.take()

    def cut(self) -> list[TextPiece]:
        undecided = self.lexer.take_undecided()
        self._steps.close()
        self.sink.cut(undecided, is_markup=self.may_be_markup(undecided))
        return self.sink.take()

    def may_be_markup(self, undecided: str) -> bool:
        """Whether text that was being read as a call can become one."""
        return bool(undecided)

    @property
    def num_held(self) -> int:
        return self.lexer.num_left + self.sink.num_held

    def attempt(self, call: Callable[[], Steps[None]]) -> Steps[None]:
        """Read a call, or else let all that was taken of it be content."""
        self.lexer.record()
        try:
            yield from call()
        except Malformed:
            self.sink.reject(self.lexer.recorded())
        else:
            self.lexer.recorded()

    def end_call(self) -> None:
        """The call is complete. An error after this does not reject it."""
        self.sink.end_call()
        self.lexer.record()


class CallParser(LexedParser):
    """Content, with calls in it that begin at a mark.

    Where a format wraps its calls into a section, they are looked for inside of it only.
    """

    syntax: ClassVar[CallSyntax]
    begins: ClassVar[tuple[str, ...]]  # a call begins with one of them
    ends: ClassVar[tuple[str, ...]] = ()  # a call ends with one of them
    section: ClassVar[tuple[str, str] | None] = None
    other_marks: ClassVar[tuple[str, ...]] = ()
    ends_reasoning = False  # whether its first mark, a special token, also ends open reasoning

    def __init__(self, tools: Sequence[Tool] = (), new_id: Callable[[], str] | None = None) -> None:
        self.tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self.marks = frozenset({*self.begins, *self.ends, *(self.section or ()), *self.other_marks})
        super().__init__(new_id or self.random_id)

    @property
    def first_marks(self) -> tuple[str, ...]:
        """What a reply's first call begins with."""
        return (self.section[0],) if self.section else self.begins

    @staticmethod
    def random_id() -> str:
        return f"call_{uuid.uuid4().hex[:24]}"

    @abstractmethod
    def read_call(self) -> Steps[None]:
        """One call, from its first mark on."""

    def read_reply(self) -> Steps[None]:
        yield from self.read_start()
        first = Marks.of(*self.first_marks)
        while not (yield from self.lexer.ended()):
            if text := (yield from self.lexer.text_before(first)):
                self.sink.content(text)
            elif self.section:
                yield from self._read_section(*self.section)
            else:
                yield from self.attempt(self.read_call)

    def read_start(self) -> Steps[None]:
        """What a reply may begin with, for formats without a first mark."""
        yield from ()

    def _read_section(self, opening: str, closing: str) -> Steps[None]:
        """A section is one only if there is a call in it. Otherwise it is text, like any other."""
        num_before = self.sink.num_complete
        if (yield from self.lexer.is_followed(opening, self.begins)):
            yield from self.attempt(self._read_opening_call)
        else:
            yield from self.lexer.expect(opening)
            self.sink.content(opening)
            return
        marks = Marks.of(*self.begins, closing)
        while not (yield from self.lexer.ended()):
            if text := (yield from self.lexer.text_before(marks)):
                self.sink.content(text)
            elif (yield from self.lexer.accept(closing)):
                if self.sink.num_complete == num_before:
                    self.sink.content(closing)
                return
            else:
                yield from self.attempt(self.read_call)

    def _read_opening_call(self) -> Steps[None]:
        assert self.section is not None
        yield from self.lexer.expect(self.section[0])
        yield from self.lexer.space()
        yield from self.read_call()
