"""Separates reasoning, which stands between two marks, from the reply. Knows no tool calls.

A chat template may open the reasoning, or open and close it, at the end of the prompt: then the
reply begins inside of it, or behind it. Some families also put marks around the answer: these are
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pippin.text.lexer import Lexer, Malformed, Marks, Steps
from pippin.text.parsers.base import ReplyParser
from pippin.text.pieces import Reasoning, TextPiece, joined


@dataclass(frozen=True)
class ReasoningMarks:
    begin: str
    end: str
    # What an answer begins with: a mark, and where the rest of it differs, the mark that ends it.
    headers: tuple[tuple[str, str], ...] = ()
    trailers: tuple[str, ...] = ()  # what it ends with
    # A chat template with one of these writes them; without any here, one with all the marks.
    template_marks: tuple[str, ...] = ()

    def is_open_after(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.begin)

    def last_in(self, begun: str) -> str:
        """The mark that counts at the end of a partial reply; without any, it does not reason."""
        return self.begin if begun.rfind(self.begin) > begun.rfind(self.end) else self.end

    def are_in(self, template: str) -> bool:
        """Whether a chat template writes them."""
        if self.template_marks:
            return any(mark in template for mark in self.template_marks)
        return all(mark in template for mark in (self.end, *(header for header, _ in self.headers)))


class ReasoningParser(ReplyParser):
    """Reasoning first, if there is any; another parser reads all that follows.

    White space around the reasoning belongs to its marks. A reply that never closes it has
    nothing else.
    """

    def __init__(
        self,
        marks: ReasoningMarks,
        rest: ReplyParser,
        *,
        is_open: bool = False,
        other_ends: Sequence[str] = (),
        call_marks: Sequence[str] = (),
    ) -> None:
        headers = [mark for header in marks.headers for mark in header if mark]
        self.marks = frozenset(
            {marks.begin, marks.end, *headers, *marks.trailers, *other_ends, *rest.marks}
        )
        self._headers, self._trailers = marks.headers, marks.trailers
        # A trailer is one only before these, or the end: arguments may hold it as text.
        self._after_trailer = (
            *(header for header, _ in marks.headers),
            *marks.trailers,
            *call_marks,
        )
        self._begin, self._end = marks.begin, marks.end
        self._ends = Marks.of(marks.end, *other_ends)
        self._rest = rest
        self.in_reasoning = is_open
        self._lexer = Lexer()
        self._pieces: list[TextPiece] = []
        self._space = ""
        self._steps = self._read(is_open)

    def feed(self, text: str) -> list[TextPiece]:
        self._lexer.feed(text)
        next(self._steps, None)
        return self._take()

    def close(self) -> list[TextPiece]:
        self._lexer.close()
        next(self._steps, None)
        self._pieces += self._rest.close()
        return self._take()

    def cut(self) -> list[TextPiece]:
        is_markup = bool(self._lexer.take_undecided())
        self._steps.close()
        if self._space and not is_markup and not self.in_reasoning:
            self._pieces += self._rest.feed(self._space)
        self._space = ""
        self._pieces += self._rest.cut()
        return self._take()

    @property
    def num_held(self) -> int:
        return self._lexer.num_left + len(self._space) + self._rest.num_held

    def _take(self) -> list[TextPiece]:
        pieces, self._pieces = joined(self._pieces), []
        return pieces

    def _read(self, is_open: bool) -> Steps[None]:
        space = yield from self._lexer.space()
        if (yield from self._lexer.accept(self._begin)) or is_open:
            yield from self._lexer.space()
            yield from self._read_reasoning()
        else:
            self._feed_rest(space)
        yield from self._read_header()
        trailers = Marks.of(*self._trailers)
        while not (yield from self._lexer.ended()):
            if text := (yield from self._lexer.text_before(trailers)):
                self._feed_rest(text)
            elif not (yield from self._read_trailer()):
                self._feed_rest((yield from self._lexer.char()))
        self._pieces += self._rest.feed(self._space)
        self._space = ""

    def _read_reasoning(self) -> Steps[None]:
        self.in_reasoning = True
        while text := (yield from self._lexer.text_before(self._ends)):
            text = self._space + text
            visible = text.rstrip()
            self._space = text[len(visible) :]
            if visible:
                self._pieces.append(Reasoning(visible))
        self._space = ""
        self.in_reasoning = False
        if (yield from self._lexer.accept(self._end)):
            yield from self._lexer.space()

    def _read_header(self) -> Steps[None]:
        """Drop what opens an answer. A header that never ends is text."""
        for begin, end in self._headers:
            if not (yield from self._lexer.is_next(begin)):
                continue
            self._lexer.record()
            try:
                yield from self._lexer.expect(begin)
                if end:
                    yield from self._lexer.name_before(Marks.of(end, "\n"))
                    yield from self._lexer.expect(end)
            except Malformed:
                self._feed_rest(self._lexer.recorded())
            else:
                self._lexer.recorded()
                self._space = ""
                yield from self._lexer.space()
            return

    def _read_trailer(self) -> Steps[bool]:
        for trailer in self._trailers:
            if (yield from self._lexer.is_followed(trailer, self._after_trailer)):
                yield from self._lexer.expect(trailer)
                self._space = ""
                yield from self._lexer.space()
                yield from self._read_header()
                return True
        return False

    def _feed_rest(self, text: str) -> None:
        """White space before a trailer belongs to it."""
        if self._trailers:
            text = self._space + text
            visible = text.rstrip()
            text, self._space = visible, text[len(visible) :]
        self._pieces += self._rest.feed(text)
