"""Story-like prompts of an exact number of tokens.

Two prompts share a prefix only if one was built from the other: each draws its own random words.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

NAMES = ["Lily", "Tom", "Mia", "Ben", "Sara", "Max", "Anna", "Sam", "Lucy", "Tim"]
QUALITIES = ["little", "big", "happy", "sad", "red", "blue", "old", "new", "brave", "funny"]
THINGS = ["dog", "cat", "bird", "fox", "bear", "tree", "house", "ball", "box", "boat", "hat"]
PLACES = ["park", "garden", "forest", "beach", "farm", "school", "kitchen", "river", "hill"]
VERBS = ["saw", "found", "liked", "wanted", "followed", "helped", "lost", "hid", "watched"]
MAX_CORRECTIONS = 32

CountTokens = Callable[[str], int]


def count_with(model_dir: Path) -> CountTokens:
    """Counts as a server of this checkpoint does."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text).ids)


class Prompts:
    """A source of prompts; equal seeds give equal prompts.

    Without `count_tokens` each word counts as one token, which is close for English.
    """

    def __init__(self, seed: str, count_tokens: CountTokens | None = None) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._count = count_tokens

    def beside(self, name: str) -> Prompts:
        """Another source of the same kind, which draws from a seed of its own."""
        return Prompts(f"{self.seed}, {name}", self._count)

    def text(self, num_tokens: int) -> str:
        words: list[str] = []
        while len(words) < num_tokens:
            words += self._sentence()
        del words[num_tokens:]
        for _ in range(MAX_CORRECTIONS if self._count else 0):
            excess = self._num_tokens(words) - num_tokens
            if excess == 0:
                break
            if excess > 0:
                del words[-excess:]
            else:
                words += [" " + self._random.choice(THINGS) for _ in range(-excess)]
        return "".join(words)

    def question(self) -> str:
        pick = self._random.choice
        return (
            f"Tell me a story about a {pick(QUALITIES)} {pick(THINGS)} and a {pick(QUALITIES)} "
            f"{pick(THINGS)} in the {pick(PLACES)}."
        )

    def _sentence(self) -> list[str]:
        pick = self._random.choice
        words = f"{pick(NAMES)} {pick(VERBS)} the {pick(QUALITIES)} {pick(THINGS)}"
        words += f" in the {pick(QUALITIES)} {pick(PLACES)}"
        return [" " + word for word in words.split()] + ["."]

    def _num_tokens(self, words: list[str]) -> int:
        assert self._count is not None
        return self._count("".join(words))
