"""Builds one array of pieces of others. Knows lines and columns, not whose they are.

Pieces are copied into a new array in place. Nothing of another row is in a line:

    one line:   [ what the row had in main | what it has in the tail | zeros ]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from pippin.backends.mlx.layout import LayerCache

Source = tuple[str, int]  # "main" or "shared", and the number of an old cohort; or "tail", 0
Sources = Mapping[Source, mx.array]  # [lines, heads, columns, dim] each
TAIL_SOURCE: Source = ("tail", 0)


@dataclass(frozen=True)
class Piece:
    """Some columns of some lines of a source, and where in the new array they go."""

    source: Source
    line: int
    start: int
    stop: int
    to_line: int = 0
    to_column: int = 0
    num_lines: int = 1  # in the new array; a shared source has one line for all of them

    @property
    def num_columns(self) -> int:
        return self.stop - self.start

    @property
    def end_line(self) -> int:
        return self.line + (1 if self.source[0] == "shared" else self.num_lines)

    def joined(self, below: Piece) -> Piece | None:
        """This and the piece of the next line as one; None if they are not one rectangle."""
        line = self.line if self.source[0] == "shared" else self.end_line
        expected = replace(self, line=line, to_line=self.to_line + self.num_lines, num_lines=1)
        return replace(self, num_lines=self.num_lines + 1) if below == expected else None

    def cut(self, sources: Sources) -> mx.array:
        """The very source where that is all of it."""
        source = sources[self.source]
        cut = source[self.line : self.end_line, :, self.start : self.stop]
        return source if cut.shape == source.shape else cut

    def paste(self, sources: Sources, new: mx.array) -> None:
        lines = slice(self.to_line, self.to_line + self.num_lines)
        columns = slice(self.to_column, self.to_column + self.num_columns)
        new[lines, :, columns] = self.cut(sources)


@dataclass(frozen=True)
class Blueprint:
    """What an array is made of: the same for all caches of one window."""

    stored: tuple[int, ...]  # columns of each line; the rest are zeros
    columns: int
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, lines: Sequence[Sequence[Piece]], stored: Sequence[int], columns: int) -> Blueprint:
        """Pieces that are alike and below each other become one."""
        open_pieces: dict[object, Piece] = {}
        pieces: list[Piece] = []
        for to_line, line in enumerate(lines):
            for piece in line:
                placed = replace(piece, to_line=to_line)
                key = (piece.source, piece.start, piece.stop, piece.to_column)
                above = open_pieces.get(key)
                joined = None if above is None else above.joined(placed)
                if above is not None and joined is None:
                    pieces.append(above)
                open_pieces[key] = joined or placed
        pieces += open_pieces.values()
        return cls(tuple(stored), columns, tuple(sorted(pieces, key=lambda p: p.to_column)))

    def build(self, cache: LayerCache, side: int, sources: Sources) -> mx.array:
        """A new array; or the very source, where that is what is wanted."""
        heads, dim = cache.shapes[side]
        shape = (len(self.stored), heads, self.columns, dim)
        dtype = cache.dtypes[side]
        first, *others = self.pieces
        begin = first.cut(sources)
        if first.to_column or begin.shape[0] < shape[0]:
            new, others = mx.zeros(shape, dtype), list(self.pieces)
        elif not others and begin is sources[first.source] and begin.shape == shape:
            return begin
        else:  # it begins every line: nothing need be written twice
            blank = mx.zeros((*shape[:2], shape[2] - begin.shape[2], dim), dtype)
            new = mx.concatenate([begin, blank], axis=2)
        for piece in others:
            piece.paste(sources, new)
        return new


def columns_of(pieces: Iterable[Piece], first: int, last: int | None = None) -> list[Piece]:
    """Columns [first, last) of pieces that lie side by side, from column 0 on."""
    found: list[Piece] = []
    at = 0  # of the pieces' columns
    for piece in pieces:
        start = piece.start + max(first - at, 0)
        stop = piece.stop if last is None else min(piece.stop, piece.start + last - at)
        if start < stop:
            to_column = max(at - first, 0)
            found.append(replace(piece, start=start, stop=stop, to_column=to_column))
        at += piece.num_columns
    return found
