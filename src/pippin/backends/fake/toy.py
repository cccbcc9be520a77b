"""The toy model: what a row remembers of its tokens, and what it says next. Knows no device.

Its next token depends on three digests, one per component: a rolling hash of all tokens (state), a
sum over all positions (attention) and a sum over the last `window` positions (window). A restore
of the wrong thing, a missing token or a polluted state therefore changes the text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce

from pippin.backends.base import Admit
from pippin.backends.fake.payloads import FakePayload
from pippin.types import Component

# Raise it whenever a digest is computed differently: what is on disk from before is not read then.
ARITHMETIC_VERSION = 1
MASK = (1 << 61) - 1


def mix(*values: int) -> int:
    h = 0x9E3779B97F4A7C15
    for value in values:
        h = (h ^ (value + 1)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        h ^= h >> 31
    return h & MASK


@lru_cache(maxsize=1 << 16)
def placed(position: int, token: int) -> int:
    """What a token adds to sums over positions."""
    return mix(position, token)


@dataclass
class ToyRow:
    """What one slot holds."""

    admit: Admit
    window: int  # 0: the model keeps none
    # Of the KV: what rejected drafts left behind `length` is overwritten, and never read.
    cells: list[int] = field(default_factory=list)
    length: int = 0
    state: int = 0  # before `pending`
    pending: list[int] = field(default_factory=list)  # accepted drafts: the next token runs them
    attention: int = 0
    num_sampled: int = 0
    hidden: list[int] = field(default_factory=list)  # restored, until a token is run
    num_rejected: int = 0  # drafts of the last step, of which a plan may not know yet
    borrowed: tuple[FakePayload, ...] = ()  # restored by reference: must not be released
    destroyed: bool = False  # a failed step left it undefined

    def __post_init__(self) -> None:
        self.num_sampled = len(self.admit.reply)

    def copy(self) -> ToyRow:
        """One that goes on by itself."""
        copied = copy.copy(self)
        copied.cells, copied.pending, copied.hidden = [*self.cells], [*self.pending], [*self.hidden]
        return copied

    @property
    def num_borrowed(self) -> int:
        return sum(payload.num_tokens for payload in self.borrowed)

    def is_reply(self, position: int) -> bool:
        """Whether its token has been sampled in this slot, or forced."""
        return position >= len(self.admit.prompt) + len(self.admit.reply)

    @property
    def tokens(self) -> list[int]:
        return self.cells[: self.length]

    @property
    def folded_state(self) -> int:
        """The recurrent state after all that the row holds."""
        return reduce(mix, self.pending, self.state)

    def run(self, token: int) -> None:
        self._append(token)
        self.state, self.pending = mix(self.folded_state, token), []

    def write_drafts(self, drafts: Sequence[int]) -> None:
        """Their KV is there whether or not they will be accepted."""
        self.cells[self.length : self.length + len(drafts)] = drafts

    def accept(self, token: int) -> None:
        assert self.cells[self.length] == token
        self._append(token)
        self.pending.append(token)

    def drop_behind(self, length: int) -> None:
        """Do without drafts that the last step accepted; the row samples nothing any more."""
        num_dropped = self.length - length
        assert 0 <= num_dropped <= len(self.pending), "a row can drop accepted drafts alone"
        del self.pending[len(self.pending) - num_dropped :]
        self.length = length

    def _append(self, token: int) -> None:
        self.attention = self.attention + placed(self.length, token) & MASK
        self.cells[self.length : self.length + 1] = [token]
        self.length += 1
        self.hidden = []

    def restore(
        self, length: int, window: Sequence[int], tokens: Sequence[int], state: int
    ) -> None:
        """Rebuild the row from payloads alone; what no payload covers stays unknown (-1)."""
        self.cells, self.length = [-1] * length, length
        for known in (window, tokens):
            if known:
                self.cells[length - len(known) :] = known
        self.attention = sum(placed(i, t) for i, t in enumerate(self.cells)) & MASK
        self.state, self.pending = state, []

    def check_borrowed(self) -> None:
        for payload in self.borrowed:
            payload.check_alive()

    def destroy(self) -> None:
        """What a failed step may leave: other tokens, another state."""
        self.destroyed = True
        self.state ^= 1
        self.attention ^= 1
        self.hidden = []
        self.cells = [-2] * len(self.cells)

    def digests(self, components: Sequence[Component]) -> list[int]:
        """What the next token depends on: the toy's hidden vector."""
        digests = [self.length]
        if Component.STATE in components:
            digests.append(self.folded_state)
        if Component.ATTENTION in components:
            digests.append(self.attention)
        if self.window:
            first = max(0, self.length - self.window)
            recent = enumerate(self.cells[first : self.length], first)
            digests.append(sum(placed(i, t) for i, t in recent) & MASK)
        return digests

    def next_token(self, components: Sequence[Component], vocab_size: int) -> int:
        digests = self.hidden or self.digests(components)
        if not self.admit.params.greedy:
            digests += [self.admit.seed, self.num_sampled]
        token = mix(*digests) % vocab_size
        if self.num_sampled < self.admit.params.min_tokens:
            while token in self.admit.stop_ids:
                token = (token + 1) % vocab_size
        return token
