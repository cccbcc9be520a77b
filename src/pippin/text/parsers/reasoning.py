"""Separates reasoning, which stands between two marks, from the reply. Knows no tool calls.

A chat template may open the reasoning, or open and close it, at the end of the prompt: then the
reply begins inside of it, or behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pippin.text.lexer import Lexer, Marks, Steps
from pippin.text.parsers.base import ReplyParser
from pippin.text.pieces import Reasoning, TextPiece, joined


@dataclass(frozen=True)
class ReasoningMarks:
    begin: str
    end: str

    def is_open_after(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.begin)

    def last_in(self, begun: str) -> str:
        """The mark that counts at the end of a partial reply; without any, it does not reason."""
        return self.begin if begun.rfind(self.begin) > begun.rfind(self.end) else self.end


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
    ) -> None:
        self.marks = frozenset({marks.begin, marks.end, *other_ends, *rest.marks})
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
            self._pieces += self._rest.feed(space)
        while text := (yield from self._lexer.text_before(_NO_MARKS)):
            self._pieces += self._rest.feed(text)

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


_NO_MARKS = Marks.of()
