"""Comparing what two computations of one model say, where rounding may tip a choice.

Two orders of the same float32 sums give log probabilities that differ in their last digits: on
another machine, in another batch, after a prefix that was not computed again. Tokens that differ
by no more than that are *level*, and a greedy choice among them may fall either way. So no test
asks for one particular token of several that are level:

- A reply may be scored by a reference that is given the reply's own tokens (`reference.py`). Then
  each of them must be the reference's best, or level with it (`assert_best`).
- Two replies may be compared until they part, and they may part only between tokens that are level
  (`count_same`). From there on they are two different texts.

Knows nothing of models, backends or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pippin.types import TokenLogprobs

# Of a log probability, between two orders of the same float32 sums. With any BLAS the small models
# of the tests stay below 6e-5; with noise of 1e-6 in the output of each linear layer, below 7e-4.
TOLERANCE = 1e-3
# Each of two tokens may be off by the tolerance: whichever leads by more leads in both orders.
MARGIN = 2 * TOLERANCE
# Of all tokens, how many must have been compared: one reply of two may part at its beginning.
ENOUGH = 0.5


class ScoredReply(Protocol):
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobs]:
        """Of each token, with two alternatives at least."""


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, with no more than float32's rounding."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x.astype(np.float32)


def assert_best(tokens: Sequence[int], logprobs: np.ndarray, margin: float = MARGIN) -> None:
    """Each token is the best of its row of `logprobs` [tokens, vocab], or level with the best."""
    behind = logprobs.max(axis=1) - logprobs[range(len(tokens)), tokens]
    late = np.flatnonzero(behind > margin)
    assert not late.size, f"token {late[0]} of {len(tokens)} is {behind[late[0]]:.2g} behind"


def assert_top(top: Sequence[int], logprobs: np.ndarray) -> None:
    """These are the best of `logprobs` [vocab], but for what is level with the last of them."""
    assert len(set(top)) == len(top)
    if top:
        assert logprobs[list(top)].min() >= np.sort(logprobs)[-len(top)] - MARGIN


def count_same(tokens: Sequence[int], expected: ScoredReply) -> int:
    """How many tokens come before the two part, which they may only between tokens on a level."""
    for place, (said, wanted) in enumerate(zip(tokens, expected.tokens, strict=False)):
        if said != wanted:
            lead = _lead(expected.logprobs[place], wanted, said)
            assert lead <= MARGIN, f"token {place} is {said} and not {wanted}, {lead:.2g} ahead"
            return place
    assert len(tokens) == len(expected.tokens)
    return len(tokens)


def assert_same(replies: Sequence[ScoredReply], expected: Sequence[ScoredReply]) -> None:
    """The same tokens and log probabilities, each reply until it parts with what is expected."""
    num_same = 0
    for mine, theirs in zip(replies, expected, strict=True):
        same = count_same(mine.tokens, theirs)
        a, b = ([scored.logprob for scored in r.logprobs[:same]] for r in (mine, theirs))
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE)
        num_same += same
    assert num_same >= ENOUGH * sum(len(reply.tokens) for reply in expected)


def _lead(scored: TokenLogprobs, first: int, second: int) -> float:
    """How far ahead `first` is of `second`; infinite if either is not among the best."""
    known = dict(zip(scored.top_ids, scored.top_logprobs, strict=True))
    if first not in known or second not in known:
        return np.inf
    return abs(known[first] - known[second])
