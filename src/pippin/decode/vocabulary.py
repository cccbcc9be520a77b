"""What each token spells, as grammars see it: built once for a model. Knows no grammars.

Tokens are the bytes that the detokenizer shows, so the text of a reply obeys the grammar too. Marks
(end tokens, `<think>`, `<tool_call>`) are no text: a grammar allows one only where it names it, and
`"<think>"` in a string is spelled with ordinary tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import llguidance

SEPARATOR = "\n"  # that tokenizers neither change nor join with a word behind it


class Vocabulary:
    def __init__(
        self,
        tokens: Sequence[bytes],  # by id; empty where nothing is spelled
        *,
        eos_ids: Sequence[int],
        marks: Collection[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """Takes two seconds for 248k tokens, and in half of that no other thread runs."""
        assert eos_ids, "without an end token no reply could end"
        # The attributes that llguidance reads from a tokenizer of another library:
        self.tokens = list(tokens)
        self.special_token_ids = sorted({*marks, *eos_ids})
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True
        self._encode = encode
        self._marks = frozenset(self.special_token_ids)
        self.tokenizer = llguidance.LLTokenizer(self, eos_token=list(eos_ids))  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that a grammar forces, as the model would choose them, no marks."""
        spelled = self._encode(text)
        if self._spells(spelled, text):
            return spelled
        # SentencePiece adds a space before the first word of a text; this text continues another.
        spelled = self._encode(SEPARATOR + text)
        for number, token in enumerate(spelled):
            if token < len(self.tokens) and self.tokens[token].endswith(SEPARATOR.encode()):
                if self._spells(rest := spelled[number + 1 :], text):
                    return rest
                break
        return self.tokenizer.greedy_tokenize(text)

    def _spells(self, tokens: Sequence[int], text: str) -> bool:
        if not self._marks.isdisjoint(tokens) or max(tokens, default=0) >= len(self.tokens):
            return False
        return b"".join(self.tokens[token] for token in tokens) == text.encode()
