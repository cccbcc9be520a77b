"""What the comparisons of near_ties.py let pass, and what not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from builders import Reply
from near_ties import MARGIN, TOLERANCE, assert_best, assert_same, assert_top, count_same
from pippin.types import TokenLogprobs

LEVEL, CLEAR = 0.9 * MARGIN, 1.1 * MARGIN


def make_reply(tokens: Sequence[int], leads: Sequence[float], *, off_by: float = 0.0) -> Reply:
    """Each token ahead of the next number by `leads`."""
    best = -0.5 + off_by
    scored = [
        TokenLogprobs(best, (t, t + 1), (best, best - lead))
        for t, lead in zip(tokens, leads, strict=True)
    ]
    return Reply("r0", tokens=list(tokens), logprobs=scored)


def test_replies_may_part_only_between_tokens_that_are_level() -> None:
    expected = make_reply([5, 6, 7], [CLEAR, LEVEL, CLEAR])
    assert count_same([5, 6, 7], expected) == 3
    assert count_same([5, 7, 1], expected) == 1
    assert count_same([5, 7], expected) == 1  # another text may end elsewhere
    for wrong in ([6, 6, 7], [5, 6, 8], [5, 9, 7], [5, 6]):
        with pytest.raises(AssertionError):
            count_same(wrong, expected)


def test_most_is_compared_and_log_probabilities_until_replies_part() -> None:
    expected = make_reply([5, 6, 7, 8], [CLEAR, CLEAR, LEVEL, CLEAR])
    assert_same([make_reply([5, 6, 8, 1], [CLEAR] * 4, off_by=0.9 * TOLERANCE)], [expected])
    early = make_reply([5, 6, 7], [LEVEL, CLEAR, CLEAR])
    parted = make_reply([6, 1, 2], [CLEAR] * 3)
    assert_same([parted, early], [early, early])
    off = make_reply([5, 6, 8, 1], [CLEAR] * 4, off_by=1.1 * TOLERANCE)
    for wrong, theirs in ((off, expected), (parted, early)):
        with pytest.raises(AssertionError):
            assert_same([wrong], [theirs])


def test_what_a_reference_scored_must_be_its_best_or_level_with_it() -> None:
    logprobs = np.array([[-1.0, -1.0 - LEVEL, -1.0 - CLEAR]] * 2)
    assert_best([0, 1], logprobs)
    with pytest.raises(AssertionError, match="token 1 of 2"):
        assert_best([0, 2], logprobs)


def test_alternatives_may_be_exchanged_for_what_is_level_with_the_last() -> None:
    logprobs = np.array([-1.0, -2.0, -2.0 - LEVEL, -2.0 - CLEAR])
    for top in ([0], [0, 1], [0, 2], []):
        assert_top(top, logprobs)
    for top in ([0, 3], [0, 0], [1]):
        with pytest.raises(AssertionError):
            assert_top(top, logprobs)
