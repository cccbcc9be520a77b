"""Stop strings over text in pieces, against the same text read one character at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pippin.text.detokenizer import StopMatcher

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def first_complete(text: str, stops: list[str]) -> str:
    """What precedes the stop string that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


@given(st.lists(st.text("abc", max_size=4), max_size=8), STOPS)
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    if matcher.matched is None:
        shown += matcher.flush()
    assert shown == first_complete("".join(pieces), stops)


@given(st.lists(st.text("abc", max_size=4), max_size=8), STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    held = "".join(pieces)[len(shown) :]
    assert matcher.matched or not held or any(stop.startswith(held) for stop in stops)


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["\n\n"])
    assert [matcher.feed(text) for text in ("one\n", "\ntwo", "three")] == ["one", "", ""]
