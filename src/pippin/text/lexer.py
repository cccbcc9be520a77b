"""Reads text that arrives in parts, up to marks.

Readers are generators: each `yield` waits for more text. So a format reads as if all of its text
were there, and gives the same answers however the text was cut.

text:    [ taken by the reader | not yet decided ]
             since `record()`: kept, in case it turns out to be no call
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

MAX_NAME_LEN = 256  # characters; what is longer is no function's or parameter's name
_NOT_SPACE = re.compile(r"\S")


class Malformed(Exception):
    """The text does not follow the format."""


class Marks:
    """Strings that mean something wherever they stand. None begins another one."""

    @staticmethod
    @cache
    def of(*marks: str) -> Marks:
        """Made once: every reply needs the same ones."""
        return Marks(*marks)

    def __init__(self, *marks: str) -> None:
        assert all(marks), "an empty mark would stand everywhere"
        assert not any(a != b and b.startswith(a) for a in marks for b in marks), marks
        self._pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        self._beginnings = {mark[:n] for mark in marks for n in range(1, len(mark))}
        self._longest = max(map(len, marks), default=0)

    def find(self, text: str, start: int) -> int | None:
        found = self._pattern.search(text, start)
        return None if found is None else found.start()

    def num_held(self, text: str, start: int) -> int:
        """Characters at the end of `text` with which some mark may begin."""
        for num in range(min(self._longest - 1, len(text) - start), 0, -1):
            if text[-num:] in self._beginnings:
                return num
        return 0


class Lexer:
    """Text in, what stands before and at marks out."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._looking_from: int | None = None  # where a look ahead began that takes nothing
        self._record: list[str] | None = None  # what was taken and is no longer in `_text`
        self._record_from = 0
        self._closed = False

    def feed(self, text: str) -> None:
        """Costs no more for a long record: only what was not taken is copied."""
        keep = self._at if self._looking_from is None else self._looking_from
        if self._record is not None:
            self._record.append(self._text[self._record_from : keep])
            self._record_from = 0
        self._text = self._text[keep:] + text
        self._at -= keep
        self._looking_from = None if self._looking_from is None else 0

    def close(self) -> None:
        """No more text will come."""
        self._closed = True

    def take_undecided(self) -> str:
        """What was taken since `record()`, and all that no reader has taken."""
        taken = "" if self._record is None else self.recorded()
        start = self._at if self._looking_from is None else self._looking_from
        taken = taken[: len(taken) - (self._at - start)]
        self._at = start
        return taken + self._take(len(self._text))

    @property
    def num_left(self) -> int:
        """Characters that no reader has taken."""
        return len(self._text) - self._at

    # ---- text that was taken, kept in case it is no call ------------------------------------

    def record(self) -> None:
        self._record, self._record_from = [], self._at

    def recorded(self) -> str:
        """All that was taken since `record()`, which ends here."""
        assert self._record is not None
        text = "".join(self._record) + self._text[self._record_from : self._at]
        self._record = None
        return text

    def rewind(self) -> None:
        """Give back what was taken since `record()`."""
        self._text, self._at = self.recorded() + self._text[self._at :], 0

    # ---- readers ---------------------------------------------------------------------------

    def ended(self) -> Steps[bool]:
        """Whether all text has been taken and no more will come."""
        return not (yield from self._has(1))

    def text_before(self, marks: Marks) -> Steps[str]:
        """The next text before any mark; empty if a mark is next, or the end."""
        while True:
            found = marks.find(self._text, self._at)
            if found is not None:
                return self._take(found)
            num_held = 0 if self._closed else marks.num_held(self._text, self._at)
            if len(self._text) - num_held > self._at or self._closed:
                return self._take(len(self._text) - num_held)
            yield

    def without_cut_mark(self, text: str, marks: Marks) -> str:
        """Text that was taken, without the start of a mark that the end of the reply cut."""
        is_last = self._closed and not self.num_left
        return text[: len(text) - marks.num_held(text, 0)] if is_last else text

    def is_next(self, mark: str) -> Steps[bool]:
        """Whether `mark` stands here. Looks no further than the first difference."""
        while True:
            text = self._text[self._at : self._at + len(mark)]
            if len(text) == len(mark) or not mark.startswith(text) or self._closed:
                return text == mark
            yield

    def accept(self, mark: str) -> Steps[bool]:
        """Take `mark`, if it stands here."""
        found = yield from self.is_next(mark)
        if found:
            self._at += len(mark)
        return found

    def accept_any(self, marks: Iterable[str]) -> Steps[str | None]:
        for mark in marks:
            if (yield from self.accept(mark)):
                return mark
        return None

    def expect(self, mark: str) -> Steps[None]:
        if not (yield from self.accept(mark)):
            raise Malformed

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        return self._text[self._at] if (yield from self._has(1)) else ""

    def char(self) -> Steps[str]:
        char = yield from self.peek()
        if not char:
            raise Malformed
        self._at += 1
        return char

    def space(self) -> Steps[str]:
        """Take white space."""
        taken = ""
        while True:
            found = _NOT_SPACE.search(self._text, self._at)
            taken += self._take(len(self._text) if found is None else found.start())
            if found is not None or self._closed:
                return taken
            yield

    def name_before(self, marks: Marks) -> Steps[str]:
        """Take a name, and the white space around it, that ends before one of `marks`."""
        yield from self.space()
        name = ""
        while text := (yield from self.text_before(marks)):
            name += text
            if len(name) > MAX_NAME_LEN:
                self._at -= len(name) - MAX_NAME_LEN  # fails here however the text was cut
                raise Malformed
        if not name or (yield from self.ended()):
            raise Malformed
        return name.strip()

    def is_followed(self, mark: str, nexts: Iterable[str]) -> Steps[bool]:
        """Whether `mark` stands here and, after white space, one of `nexts` or the end.

        Takes nothing.
        """
        if not (yield from self.is_next(mark)):
            return False
        self._looking_from = self._at  # `feed` keeps what must be read again
        self._at += len(mark)
        yield from self.space()
        found = yield from self.ended()
        for next_mark in nexts:
            found = found or (yield from self.is_next(next_mark))
        self._at, self._looking_from = self._looking_from, None
        return found

    def _has(self, num: int) -> Steps[bool]:
        while self.num_left < num and not self._closed:
            yield
        return self.num_left >= num

    def _take(self, end: int) -> str:
        text, self._at = self._text[self._at : end], end
        return text
