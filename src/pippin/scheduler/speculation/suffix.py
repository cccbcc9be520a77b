"""Drafts what followed the last tokens before: in the request's own text and prediction, in the
radix tree, and in what other requests of its salt said. Knows no weights and no device.

A request's text is what the tree has behind its whole prompt, if anything, the reply that its
client predicts, its prompt and its reply. It is indexed while the reply is generated, some of it in
each step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.request import Request
from pippin.scheduler.speculation.drafter import NO_GUESS, Guess
from pippin.scheduler.speculation.shared_texts import SharedTexts
from pippin.scheduler.speculation.text_index import MAX_MATCH, SEPARATOR, Match, TextIndex

MAX_TEXT = 1 << 18  # tokens of a prompt: of longer ones the last
MAX_FROM_TREE = 4096  # tokens behind a prompt
SLICE = 2048  # tokens of all texts that a step indexes: about a quarter of a millisecond
LONGER_MATCHES = 5, 9, 17  # each is a class of its own: acceptance is learnt for each
DOUBTFUL = 0.5  # share of places that agree: with less, a match counts as a shorter one


@dataclass
class _Text:
    index: TextIndex
    num_replied: int = 0  # tokens of the reply that are in it


class SuffixDrafter:
    name = "suffix"

    def __init__(self, cache: PrefixCache | None) -> None:
        """Without a cache requests share nothing, and this neither."""
        self._cache = cache
        self._texts: dict[str, _Text] = {}
        self._shared = SharedTexts()

    def prepare(self, requests: Iterable[Request]) -> None:
        left = SLICE
        salts: dict[bytes, None] = {}
        for request in requests:
            text = self._texts.get(request.id)
            if text is None:
                text = self._texts[request.id] = self._start(request)
            text.index.extend(request.output[text.num_replied :])
            text.num_replied = len(request.output)
            left -= text.index.index(left)
            salts[request.salt] = None
        for salt in salts:
            shared = self._shared.of(salt)
            if shared is not None and left > 0:
                left -= shared.index(left)

    def propose(self, request: Request, num_tokens: int) -> Guess:
        own = self._texts[request.id].index
        tail = own.tail()
        match, found_in = own.find(tail), own
        shared = self._shared.of(request.salt)
        if shared is not None and (match is None or match.length < MAX_MATCH):
            other = shared.find(tail)
            if other is not None and (match is None or other.length > match.length):
                match, found_in = other, shared
        if match is None:
            return NO_GUESS
        tokens = found_in.continuation(match, num_tokens, repeats=found_in is own)
        return Guess(tokens, _confidence(match))

    def forget(self, request: Request) -> None:
        self._texts.pop(request.id, None)
        if self._cache is not None and request.completed and not request.embeds:
            said = request.tokens(request.num_tokens)[request.cached_len :]
            self._shared.add(request.salt, said)

    def flush(self) -> None:
        self._shared.clear()

    def _start(self, request: Request) -> _Text:
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
        return _Text(index)


def _confidence(match: Match) -> int:
    longer = sum(match.length >= length for length in LONGER_MATCHES)
    return max(0, longer - (match.agreeing < DOUBTFUL))
