"""Replies of no model, tokens drawn at random among what a grammar allows; and a prover of none."""

from __future__ import annotations

import random

import numpy as np

from bundled import BUNDLED_PATH
from pippin.backends.masks import allowed_ids, num_words
from pippin.decode.compile import Grammar, Vocabulary
from pippin.decode.prover import Verdict
from pippin.engine.grammar_zygote import vocabulary_of
from pippin.text.tokenizer import Tokenizer
from pippin.types import GrammarSpec

VOCAB = 8192
CLOSING = tuple(b'"}]')


def bundled_vocabulary() -> Vocabulary:
    return vocabulary_of(Tokenizer.load(BUNDLED_PATH), VOCAB)


def walk(
    grammar: Grammar, vocabulary: Vocabulary, seed: int, *, free: int = 40, most: int = 400
) -> tuple[list[int], bool]:
    """Tokens of a reply without its end, and whether it came to one.

    The first `free` are any of those allowed, as likely short ones as long ones. Then whatever
    closes something is taken where it may, so that what need not go on forever does not.
    """
    rng = random.Random(seed)
    ends = set(vocabulary.special_token_ids)
    mask = np.zeros(num_words(len(vocabulary.tokens)), dtype=np.int32)
    tokens: list[int] = []
    while len(tokens) < most and not grammar.finished:
        if forced := grammar.forced():
            grammar.advance(forced)
            tokens += forced
            continue
        grammar.fill_mask(mask)
        allowed = allowed_ids(mask, len(vocabulary.tokens)).tolist()
        token = _choose(rng, allowed, vocabulary, closing=len(tokens) >= free)
        if token in ends:
            return tokens, True
        grammar.advance([token])
        tokens.append(token)
    return tokens, grammar.finished


def _choose(
    rng: random.Random, allowed: list[int], vocabulary: Vocabulary, *, closing: bool
) -> int:
    assert allowed, "nothing may come next"
    if closing:
        for byte in CLOSING:
            for token in allowed:
                if vocabulary.tokens[token] == bytes([byte]):
                    return token
        if vocabulary.eos_token_id in allowed:
            return vocabulary.eos_token_id
    length = rng.choice(sorted({len(vocabulary.tokens[token]) for token in allowed}))
    return rng.choice([t for t in allowed if len(vocabulary.tokens[t]) == length])


class CountingProver:
    """Has one verdict on all grammars."""

    def __init__(self, verdict: Verdict | None = None) -> None:
        self.verdict = Verdict() if verdict is None else verdict
        self.asked: list[str] = []
        self.closed = False

    def load(self) -> None:
        pass

    def prove(self, spec: GrammarSpec) -> Verdict:
        self.asked.append(spec.text)
        return self.verdict

    def close(self) -> None:
        self.closed = True
