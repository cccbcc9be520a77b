"""Finds where a text's last tokens occurred before, and what followed.

As in LZ77: every place is in a chain of the places whose last three tokens hash alike, the latest
first. A search looks at the first few of a chain, so no text makes it long:

    text    a b c d e ... a b c x ... a b c         heads[hash(a b c)] -> before x -> before d
                  ^ followed here       ^ the end

Adding a token costs the same whatever the length, and 12 to 20 bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.request import Request
from pippin.scheduler.speculation import NO_TOKENS, Drafter

MIN_MATCH = 3  # tokens: fewer say nothing
MAX_MATCH = 32  # more are not compared
MAX_CANDIDATES = 16  # places that a search looks at
SEPARATOR = -1  # between texts: no token, and no proposal goes beyond it
LEAST_CAPACITY = 256  # tokens
FEW = 12  # tokens that are indexed one by one: arrays pay off for more
FACTORS = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Match:
    length: int  # tokens alike, MAX_MATCH for more
    end: int  # the place behind them
    agreeing: float  # share of the places looked at that were followed by the same token


class TextIndex:
    """Grows at its end. `index` catches up with the text, as far as a step has time for it."""

    def __init__(self, capacity: int = LEAST_CAPACITY) -> None:
        self.num_replied = 0  # tokens of a request's reply that are in it
        self._len = 0
        self._indexed = MIN_MATCH - 1  # places up to here are in chains
        self._allocate(max(LEAST_CAPACITY, capacity), np.zeros(0, dtype=np.int32))

    def __len__(self) -> int:
        return self._len

    @property
    def num_unindexed(self) -> int:
        return max(0, self._len - self._indexed)

    @property
    def nbytes(self) -> int:
        return self._text.nbytes + self._before.nbytes + self._heads.nbytes

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        end = self._len + len(tokens)
        if end > len(self._text):
            self._allocate(max(end, 2 * len(self._text)), self._text[: self._len])
        self._text[self._len : end] = tokens
        self._len = end

    def tail(self) -> list[int]:
        """The last tokens, as many as are compared."""
        tokens: list[int] = self.last(MAX_MATCH).tolist()
        return tokens

    def last(self, num_tokens: int) -> np.ndarray:
        return self._text[max(0, self._len - num_tokens) : self._len].copy()

    def index(self, num_tokens: int) -> int:
        """Catch up by at most so many tokens; returns by how many."""
        start, end = self._indexed + 1, min(self._len, self._indexed + num_tokens)
        if end - start < FEW:
            text, chain, first = self._tokens, self._chain, self._first
            for at in range(start, end + 1):
                bucket = self._bucket(text[at - 3], text[at - 2], text[at - 1])
                chain[at], first[bucket] = first[bucket], at
        else:
            self._index_many(start, end)
        self._indexed = max(self._indexed, end)
        return max(0, end + 1 - start)

    def find(self, tail: Sequence[int]) -> Match | None:
        """The longest match of these last tokens that something follows; the latest of several."""
        if len(tail) < MIN_MATCH:
            return None
        text, chain = self._tokens, self._chain
        place = self._first[self._bucket(tail[-3], tail[-2], tail[-1])]
        if place == self._len:  # the end of this text itself
            place = chain[place]
        if not place:
            return None
        most = min(len(tail), MAX_MATCH)
        best, best_end = MIN_MATCH - 1, 0
        followers: list[int] = []
        for _ in range(MAX_CANDIDATES):
            if not place:
                break
            if place < self._len and text[place] != SEPARATOR:
                length = _num_alike(text, place, tail, 0, MIN_MATCH)
                if length == MIN_MATCH:
                    followers.append(text[place])
                    # One that differs where the best did not is no longer than that.
                    if place > best and text[place - 1 - best] == tail[-1 - best]:
                        length = _num_alike(text, place, tail, length, min(most, place))
                if length > best:
                    best, best_end = length, place
                    if length == most:
                        break
            place = chain[place]
        if not best_end:
            return None
        return Match(best, best_end, followers.count(text[best_end]) / len(followers))

    def continuation(self, match: Match, num_tokens: int, *, repeats: bool) -> np.ndarray:
        """What followed it, int32; a text that `repeats` continues at its end as after the match,
        as if it were periodic."""
        tokens = self._text[match.end : min(self._len, match.end + num_tokens)]
        if repeats and len(tokens) < num_tokens:
            tokens = np.resize(tokens, num_tokens)
        ends = np.flatnonzero(tokens == SEPARATOR)
        return tokens[: ends[0]].copy() if len(ends) else tokens.copy()

    def _allocate(self, capacity: int, text: np.ndarray) -> None:
        """Chains start again: there are more of them now."""
        self._bits = (capacity - 1).bit_length()
        self._text = np.zeros(capacity, dtype=np.int32)
        self._text[: len(text)] = text
        self._before = np.zeros(capacity + 1, dtype=np.int32)  # by place: the one before; 0: none
        self._heads = np.zeros(1 << self._bits, dtype=np.int32)
        self._indexed = MIN_MATCH - 1
        # Single items of these are read faster than those of arrays.
        self._tokens, self._chain = self._text.data, self._before.data
        self._first = self._heads.data

    def _bucket(self, a: int, b: int, c: int) -> int:
        mixed = a * FACTORS[0] + b * FACTORS[1] + c * FACTORS[2]
        return (mixed & WORD) >> (32 - self._bits)

    def _index_many(self, start: int, end: int) -> None:
        """As one by one: in a sorted slice, a place follows the one before it in its chain."""
        tokens = self._text[start - MIN_MATCH : end].astype(np.uint32)
        mixed = np.zeros(end + 1 - start, dtype=np.uint32)
        for number, factor in enumerate(FACTORS):
            mixed += tokens[number : number + len(mixed)] * np.uint32(factor)
        buckets = mixed >> np.uint32(32 - self._bits)
        order = np.argsort(buckets, kind="stable")
        places, ordered = order.astype(np.int32) + np.int32(start), buckets[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = ordered[1:] != ordered[:-1]
        last = np.roll(first, -1)
        before = np.roll(places, 1)
        before[first] = self._heads[ordered[first]]
        self._before[places] = before
        self._heads[ordered[last]] = places[last]


def _num_alike(text: memoryview, place: int, tail: Sequence[int], least: int, most: int) -> int:
    """Tokens before a place that equal the last ones of `tail`; the first `least` do."""
    for length in range(least, most):
        if text[place - 1 - length] != tail[-1 - length]:
            return length
    return most


MAX_TEXT = 1 << 18  # tokens of a prompt: of longer ones the last
MAX_FROM_TREE = 4096  # tokens behind a prompt
SLICE = 2048  # tokens of all texts that a step indexes: about a quarter of a millisecond
LONGER_MATCHES = 5, 9, 17  # each is a class of its own: acceptance is learnt for each
DOUBTFUL = 0.5  # share of places that agree: with less, a match counts as a shorter one

MAX_SALTS = 16  # used last
MAX_TOKENS = 1 << 16  # of a salt; then the older half is dropped
MAX_SHARED_TEXT = MAX_TOKENS // 4  # of a request: its end


class SuffixDrafter(Drafter):
    name = "suffix"

    def __init__(self, cache: PrefixCache | None) -> None:
        """Without a cache requests share nothing, and this neither."""
        self._cache = cache
        self._texts: dict[str, TextIndex] = {}
        self._shared: OrderedDict[bytes, TextIndex] = OrderedDict()  # by salt, used last: last

    def prepare(self, requests: Iterable[Request]) -> None:
        left = SLICE
        salts: dict[bytes, None] = {}
        for request in requests:
            text = self._texts.get(request.id)
            if text is None:
                text = self._texts[request.id] = self._start(request)
            text.extend(request.output[text.num_replied :])
            text.num_replied = len(request.output)
            left -= text.index(left)
            salts[request.salt] = None
        for salt in salts:
            shared = self._shared_of(salt)
            if shared is not None and left > 0:
                left -= shared.index(left)

    def propose(self, request: Request, num_tokens: int) -> tuple[np.ndarray, int]:
        own = self._texts[request.id]
        tail = own.tail()
        match, found_in = own.find(tail), own
        shared = self._shared_of(request.salt)
        if shared is not None and (match is None or match.length < MAX_MATCH):
            other = shared.find(tail)
            if other is not None and (match is None or other.length > match.length):
                match, found_in = other, shared
        if match is None:
            return NO_TOKENS, 0
        tokens = found_in.continuation(match, num_tokens, repeats=found_in is own)
        longer = sum(match.length >= length for length in LONGER_MATCHES)
        return tokens, max(0, longer - (match.agreeing < DOUBTFUL))

    def forget(self, request: Request) -> None:
        self._texts.pop(request.id, None)
        if self._cache is not None and request.completed and not request.embeds:
            said = request.tokens(request.num_tokens)[request.cached_len :]
            self._share(request.salt, said[-MAX_SHARED_TEXT:])

    def flush(self) -> None:
        self._shared.clear()

    def _start(self, request: Request) -> TextIndex:
        prompt = request.prompt[-MAX_TEXT:]
        index = TextIndex(len(prompt) + len(prompt) // 4)
        replies = [request.prediction]  # the latest of several matches counts
        if self._cache is not None:
            known = self._cache.continuation(request.prompt, request.salt, MAX_FROM_TREE)
            replies.insert(0, known)
        for reply in replies:
            if len(reply):
                index.extend(np.concatenate([prompt[-MAX_MATCH:], reply[:MAX_TEXT], [SEPARATOR]]))
        index.extend(prompt)
        return index

    def _share(self, salt: bytes, tokens: np.ndarray) -> None:
        text = self._shared.setdefault(salt, TextIndex(MAX_TOKENS // 8))
        self._shared.move_to_end(salt)
        if len(text) + len(tokens) + 1 > MAX_TOKENS:
            kept = text.last(MAX_TOKENS // 2)
            text = self._shared[salt] = TextIndex(MAX_TOKENS)
            text.extend(kept)
        text.extend(tokens)
        text.extend([SEPARATOR])
        if len(self._shared) > MAX_SALTS:
            self._shared.popitem(last=False)

    def _shared_of(self, salt: bytes) -> TextIndex | None:
        text = self._shared.get(salt)
        if text is not None:
            self._shared.move_to_end(salt)
        return text
