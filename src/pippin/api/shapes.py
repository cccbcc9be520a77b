"""The two JSON shapes of a reply: chat and completion. Knows no engine and no transport."""

from __future__ import annotations

from typing import Any, Protocol

from pippin.api.replies import FoldedChoice
from pippin.sequences import SequencePiece, ShownToken
from pippin.text.tokenizer import Tokenizer
from pippin.types import TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity; this is what OpenAI writes


class Shape(Protocol):
    """How one choice looks, streamed and whole."""

    chunk_object: str
    whole_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says about a choice before its first text."""
        ...

    def part(self, piece: SequencePiece) -> dict[str, Any]: ...

    def whole(self, choice: FoldedChoice) -> dict[str, Any]: ...


class ChatShape:
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def part(self, piece: SequencePiece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece.shown) if piece.shown else None,
            "finish_reason": piece.finish,
        }

    def whole(self, choice: FoldedChoice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.shown) if self._with_logprobs else None,
            "finish_reason": choice.finish,
        }

    def _logprobs(self, tokens: list[ShownToken]) -> dict[str, Any]:
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: ShownToken) -> dict[str, Any]:
        assert token.logprobs is not None, "every token of a reply was predicted"
        top = zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
        return {
            **self._token(token.id, token.logprobs.logprob),
            "top_logprobs": [self._token(id, logprob) for id, logprob in top],
        }

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(id),
            "bytes": list(self._tokenizer.token_bytes(id)),
            "logprob": max(logprob, LEAST_LOGPROB),
        }


class CompletionShape:
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> None:
        return None

    def part(self, piece: SequencePiece) -> dict[str, Any]:
        return self._choice(piece.index, piece.text, piece.shown, piece.finish)

    def whole(self, choice: FoldedChoice) -> dict[str, Any]:
        return self._choice(choice.index, choice.text, choice.shown, choice.finish)

    def _choice(
        self, index: int, text: str, tokens: list[ShownToken], finish: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens) if self._with_logprobs else None,
            "finish_reason": finish,
        }

    def _logprobs(self, tokens: list[ShownToken]) -> dict[str, Any]:
        return {
            "tokens": [self._tokenizer.token_text(token.id) for token in tokens],
            "token_logprobs": [
                None if t.logprobs is None else max(t.logprobs.logprob, LEAST_LOGPROB)
                for t in tokens
            ],
            "top_logprobs": [
                None if t.logprobs is None else self._top(t.id, t.logprobs) for t in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens by their text, and the chosen one even if it is none of them."""
        top = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        by_text: dict[str, float] = {}
        for token, logprob in (top | {id: logprobs.logprob}).items():
            by_text.setdefault(self._tokenizer.token_text(token), max(logprob, LEAST_LOGPROB))
        return by_text
