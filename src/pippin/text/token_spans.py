"""Where the tokens of a reply lie in its text, for logprobs. Knows no decoder and no markup."""

from __future__ import annotations

from collections import deque

import msgspec


class TokenSpan(msgspec.Struct, frozen=True, gc=False):
    """Where one token's text lies in the reply, in characters, markup and all.

    The tokens that share one character all span it.
    """

    index: int  # 0 is the reply's first token
    id: int
    start: int
    end: int


class TokenSpans:
    """Tokens in as they are decoded, their spans out once their text has been shown in full."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_decoded = 0  # characters
        self._num_shown = 0
        self._unfinished: list[tuple[int, int, int]] = []  # (index, id, start): no end yet
        self._waiting: deque[TokenSpan] = deque()  # decoded, not shown in full

    def add(self, token: int, text: str, *, unfinished: bool) -> None:
        """A token and the text that it adds. `unfinished`: a character goes on in the next one."""
        index, start = self._num_tokens, self._num_decoded
        self._num_tokens += 1
        self.finish_character(text)
        if unfinished:
            self._unfinished.append((index, token, start))
        else:
            self._waiting.append(TokenSpan(index, token, start, self._num_decoded))

    def finish_character(self, text: str) -> None:
        """New text ends the character that earlier tokens began: now their spans are known."""
        if text:
            self._end_all(self._num_decoded + 1)
        self._num_decoded += len(text)

    def close(self) -> None:
        """No more tokens are added."""
        self._end_all(self._num_decoded)

    def show_all_but(self, num_chars: int) -> None:
        """So many characters of what was decoded are held back, or were cut off."""
        self._num_shown = self._num_decoded - num_chars

    def take_shown(self) -> list[TokenSpan]:
        spans = []
        while self._waiting and self._waiting[0].end <= self._num_shown:
            spans.append(self._waiting.popleft())
        return spans

    def take_before_cut(self) -> list[TokenSpan]:
        """A token cut in two was still needed for the text before the cut."""
        spans = [span for span in self._waiting if span.start < self._num_shown]
        self._waiting.clear()
        return spans

    def _end_all(self, end: int) -> None:
        if self._unfinished:
            self._waiting.extend(TokenSpan(i, id, start, end) for i, id, start in self._unfinished)
            self._unfinished.clear()
