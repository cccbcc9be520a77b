"""What is read for a prompt, piece by piece: several entries become one payload each.

Knows entries and buffers; knows no tree and no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pippin.cache.entries.entry import ArraySpec, Bytes, Key, Loaded
from pippin.cache.entries.entry_store import EntryStore
from pippin.cache.results import Match
from pippin.cache.tiers.parts import EntryPart, Span
from pippin.types import Component, Payload


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of one component, or what is kept after `end`."""

    component: Component
    start: int
    end: int
    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        """Of the payload that it becomes."""
        return self.end - self.start if self.component.divides else 1

    @property
    def nbytes(self) -> int:
        """To read: entries are read whole."""
        return sum(span.entry.nbytes for span in self.spans)

    @property
    def keys(self) -> list[Key]:
        return [span.entry.key for span in self.spans]


def pieces(match: Match, held: int, max_bytes: int) -> list[Piece]:
    """What restores a match on disk where memory holds the KV of the first `held` tokens.

    In the order in which a tree can take them.
    """
    found: list[Piece] = []
    for component in Component:
        spans = _spans(match.payloads.get(component, ()))
        if not spans or (component is Component.HIDDEN and match.length < match.prompt_len):
            continue
        if component.divides:
            first = held if component is Component.ATTENTION else 0
            found += _grouped(component, _from(first, match.length, spans), max_bytes)
        else:
            found.append(Piece(component, match.length, match.length, tuple(spans)))
    return found


def piece_of(component: Component, start: int, end: int, parts: Sequence[Payload]) -> Piece:
    """Of parts that follow each other along a path: KV of [start, end), or what is kept there."""
    return Piece(component, start if component.divides else end, end, tuple(_spans(parts)))


def _spans(parts: Sequence[Payload]) -> list[Span]:
    """Parts of one entry that follow each other as one: an entry is read whole, and once."""
    found: list[Span] = []
    for part in parts:
        assert isinstance(part, EntryPart)
        span = part.span
        if found and found[-1].entry is span.entry and found[-1].stop == span.start:
            span = Span(span.entry, found.pop().start, span.stop)
        found.append(span)
    return found


def _from(first: int, end: int, spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Spans that end at `end`, with their positions, less what lies before `first`."""
    start = end - sum(span.num_tokens for span in spans)
    for span in spans:
        stop = start + span.num_tokens
        if stop > first:
            skipped = max(0, first - start)
            yield start + skipped, Span(span.entry, span.start + skipped, span.stop)
        start = stop


def _grouped(
    component: Component, placed: Iterator[tuple[int, Span]], max_bytes: int
) -> Iterator[Piece]:
    """As many spans together as make a piece of `max_bytes`."""
    group: list[Span] = []
    start = nbytes = 0
    for position, span in placed:
        if group and nbytes + span.entry.nbytes > max_bytes:
            yield _piece(component, start, group)
            group, nbytes = [], 0
        if not group:
            start = position
        group.append(span)
        nbytes += span.entry.nbytes
    if group:
        yield _piece(component, start, group)


def _piece(component: Component, start: int, spans: Sequence[Span]) -> Piece:
    end = start + sum(span.num_tokens for span in spans)
    return Piece(component, start, end, tuple(spans))


def read(
    store: EntryStore, piece: Piece, specs: Sequence[ArraySpec], buffer: Bytes
) -> tuple[Bytes, ...] | list[Key]:
    """The piece's arrays, in `buffer`; or the keys that could not be read. From any thread.

    An entry of which only a part is wanted is read to memory of its own first.
    """
    arrays = _divided(buffer, specs)
    targets: list[list[Bytes]] = []
    at = 0
    for span in piece.spans:
        end = at + span.num_tokens
        targets.append([s.tokens(a, at, end) for a, s in zip(arrays, specs, strict=True)])
        at = end
    spans = list(zip(piece.spans, targets, strict=True))
    into = [to if span.is_whole else span.entry.new_buffers() for span, to in spans]
    loaded = store.read(piece.keys, into)
    lost = [key for key, found in zip(piece.keys, loaded, strict=True) if found is None]
    if lost:
        return lost
    for (span, to), found in zip(spans, loaded, strict=True):
        if found is not None and not span.is_whole:
            for target, part in zip(to, views_of(found, span), strict=True):
                target[:] = part
    return arrays


def views_of(loaded: Loaded, span: Span) -> tuple[Bytes, ...]:
    """The arrays of a part of an entry."""
    arrays = zip(loaded.entry.arrays, loaded.arrays, strict=True)
    return tuple(spec.tokens(data, span.start, span.stop) for spec, data in arrays)


def num_bytes(specs: Sequence[ArraySpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def _divided(buffer: Bytes, specs: Sequence[ArraySpec]) -> tuple[Bytes, ...]:
    ends = accumulate((spec.nbytes for spec in specs), initial=0)
    return tuple(buffer[at:end] for at, end in pairwise(ends))
