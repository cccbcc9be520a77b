"""What is read for a prompt: entries are read whole, and each of them once."""

from __future__ import annotations

import numpy as np

from pippin.cache.entries import ArraySpec, Entry, Key
from pippin.cache.prefix_cache import Match
from pippin.cache.tiers.tier_io import EntryPart, Owned, Piece, pieces
from pippin.types import Component

TOKENS = 100  # of an entry
ENTRY_BYTES = TOKENS * 8


def make_part(start: int) -> EntryPart:
    tokens = np.arange(start, start + TOKENS, dtype=np.int32).tobytes()
    keys = ArraySpec("0.keys", "float32", (TOKENS, 2), token_axis=0)
    entry = Entry(Key(b"%d" % start, Component.ATTENTION, TOKENS), b"", start, tokens, (keys,))
    return Owned(entry, on_unused=lambda owned: None).part()


def cut(part: EntryPart, *places: int) -> list[EntryPart]:
    """As a tree cuts an entry where states are kept, or where another prompt leaves it."""
    found, last = [], part
    for place in places:
        head, tail = last.split(place - last.start)
        assert isinstance(head, EntryPart)
        assert isinstance(tail, EntryPart)
        found.append(head)
        last = tail
    return [*found, last]


def pieces_of(*parts: EntryPart, held: int = 0, max_bytes: int = 1 << 20) -> list[Piece]:
    length = sum(part.num_tokens for part in parts)
    match = Match(length, length, length, None, {Component.ATTENTION: parts})  # type: ignore[arg-type]
    return pieces(match, held, max_bytes)


def placed(found: list[Piece]) -> list[tuple[int, int, list[tuple[int, int]]]]:
    return [(p.start, p.end, [(span.start, span.stop) for span in p.spans]) for p in found]


def test_an_entry_in_several_parts_is_read_once() -> None:
    found = pieces_of(*cut(make_part(0), 30, 64), *cut(make_part(100), 1))
    assert placed(found) == [(0, 200, [(0, 100), (0, 100)])]
    assert all(span.is_whole for span in found[0].spans)
    assert sum(piece.nbytes for piece in found) == 2 * ENTRY_BYTES


def test_what_memory_holds_is_left_away_and_the_rest_is_one_part() -> None:
    found = pieces_of(*cut(make_part(0), 30, 64), make_part(100), held=40)
    assert placed(found) == [(40, 200, [(40, 100), (0, 100)])]


def test_a_prompt_that_leaves_an_entry_reads_what_it_has_of_it() -> None:
    found = pieces_of(make_part(0), *cut(make_part(100), 20, 50)[:2])
    assert placed(found) == [(0, 150, [(0, 100), (0, 50)])]


def test_the_same_places_of_two_entries_are_two() -> None:
    first, second = make_part(0), make_part(100)
    found = pieces_of(*cut(first, 50)[:1], *cut(second, 50)[1:])
    assert placed(found) == [(0, 100, [(0, 50), (50, 100)])]


def test_a_piece_holds_as_many_entries_as_it_may() -> None:
    parts = [part for start in (0, 100, 200) for part in cut(make_part(start), 40)]
    found = pieces_of(*parts, max_bytes=2 * ENTRY_BYTES)
    assert placed(found) == [(0, 200, [(0, 100), (0, 100)]), (200, 300, [(0, 100)])]
