"""Which prefixes a replica can restore, as its engine reports them. Knows no tokens.

A prefix is known by the hash of its last block (`kv_events/block_hashes.py`). Prompts that are
being computed count as well: what they have in common with the next one will be there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pippin.engine.kv_events.block_hashes import BLOCK_TOKENS
from pippin.messages import RestorablePrefixes

MAX_PREFIXES = 1 << 18  # of 64 tokens each: 16 million tokens, in some 30 MB


class PrefixIndex:
    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        """Of more prefixes, those that are reported later are not known."""
        self._max_prefixes = max_prefixes
        self._reported: dict[int, int] = {}  # hash: in how many tiers
        self._expected: dict[int, int] = {}  # hash: by how many prompts
        self._sent: OrderedDict[int, None] = OrderedDict()  # hashes, the latest last

    def __len__(self) -> int:
        return len(self._reported)

    def change(self, message: RestorablePrefixes) -> None:
        if message.cleared:
            self._reported.clear()
        room = self._max_prefixes
        for hash in message.stored:
            if hash in self._reported or len(self._reported) < room:
                _count(self._reported, hash, 1)
        for hash in message.removed:
            _count(self._reported, hash, -1)

    def clear(self) -> None:
        """The engine is lost; prompts that it computes are dropped one by one."""
        self._reported.clear()
        self._sent.clear()

    def expect(self, hashes: Iterable[int]) -> None:
        for hash in hashes:
            _count(self._expected, hash, 1)
            self._sent[hash] = None
            self._sent.move_to_end(hash)
        while len(self._sent) > self._max_prefixes:
            self._sent.popitem(last=False)

    def drop(self, hashes: Iterable[int]) -> None:
        for hash in hashes:
            _count(self._expected, hash, -1)

    def restorable_tokens(self, hashes: Sequence[int]) -> int:
        """Of a prompt whose blocks have these hashes."""
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._reported or hashes[index] in self._expected:
                return (index + 1) * BLOCK_TOKENS
        return 0

    def home_tokens(self, hashes: Sequence[int]) -> float:
        """The memory that another replica would spend on a copy of what was sent here before.

        Also of what was evicted since: prompts that come back to one replica leave the memory of
        the others to other prompts. All prompts that share a block need one copy of it, so it is
        divided among this one and those that are open here.
        """
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._sent:
                known = hashes[: index + 1]
                return sum(BLOCK_TOKENS / (1 + self._expected.get(hash, 0)) for hash in known)
        return 0.0


def _count(counts: dict[int, int], hash: int, change: int) -> None:
    """A hash that is not known cannot become less."""
    count = counts.get(hash, 0) + change
    if count > 0:
        counts[hash] = count
    else:
        counts.pop(hash, None)
