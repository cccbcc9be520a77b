"""Replies of `/generate` in SGLang's words, whole or as a stream. Knows no fields of requests.

As in SGLang's streams, every event holds all of the reply so far.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pippin.api.dialects.base import data_event
from pippin.api.dialects.completions import DONE, LEAST_LOGPROB
from pippin.api.endpoints.generate import GenerateOptions
from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run import run_sequences
from pippin.engine.engine_client import Engine
from pippin.sequences import GeneratedSequence, SequencePiece
from pippin.text.tokenizer import Tokenizer
from pippin.types import TokenLogprobs

Entry = tuple[float | None, int, str | None]  # log probability, token, its text


@dataclass
class _Grown:
    """One reply so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None

    def add(self, piece: SequencePiece) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.finish = piece.finish


class GenerateReply:
    def __init__(
        self, job: Job, options: GenerateOptions, engine: Engine, tokenizer: Tokenizer
    ) -> None:
        self._job = job
        self._options = options
        self._engine = engine
        self._tokenizer = tokenizer
        self._grown = [_Grown() for _ in job.sequences]

    async def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        async for _ in self._pieces():
            pass
        replies = [self._describe(sequence) for sequence in self._job.sequences]
        return replies if self._options.many else replies[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if piece.text or piece.tokens or piece.finish:
                    reply = self._describe(self._job.sequences[piece.index])
                    yield data_event(
                        reply | {"index": piece.index} if self._options.many else reply
                    )
        yield DONE

    async def _pieces(self) -> AsyncGenerator[SequencePiece, None]:
        async with aclosing(run_sequences(self._engine, self._job)) as pieces:
            async for piece in pieces:
                self._grown[piece.index].add(piece)
                yield piece

    def _describe(self, sequence: GeneratedSequence) -> dict[str, Any]:
        grown = self._grown[sequence.index]
        meta = {
            "id": self._options.rids[sequence.index],
            "finish_reason": self._finish(sequence, grown),
            "prompt_tokens": len(sequence.prompt.tokens),
            "completion_tokens": len(grown.tokens),
            "cached_tokens": sequence.cached_tokens,
        }
        if sequence.host_tokens:
            meta["host_cached_tokens"] = sequence.host_tokens
        if sequence.disk_tokens:
            meta["disk_cached_tokens"] = sequence.disk_tokens
        if self._options.with_logprobs:
            meta |= self._logprobs(sequence, grown)
        return {"text": grown.text, "output_ids": grown.tokens, "meta_info": meta}

    def _finish(self, sequence: GeneratedSequence, grown: _Grown) -> dict[str, Any] | None:
        if grown.finish is None:
            return None
        if grown.finish == "length":
            return {"type": "length", "length": len(grown.tokens)}
        matched = sequence.stop_string
        if matched is None and grown.tokens:
            return {"type": "stop", "matched": grown.tokens[-1]}
        return {"type": "stop", "matched": matched}

    def _logprobs(self, sequence: GeneratedSequence, grown: _Grown) -> dict[str, Any]:
        start = self._options.logprob_start
        prompt = sequence.prompt.tokens
        known: list[TokenLogprobs | None] = []
        if start >= 0 and sequence.prompt_logprobs is not None:
            known = [None, *sequence.prompt_logprobs][start:]  # nothing predicts the first token
        given = prompt[start:] if known else []
        told: dict[str, Any] = {
            "input_token_logprobs": [*map(self._entry, known, given)],
            "output_token_logprobs": [*map(self._entry, grown.logprobs, grown.tokens)],
        }
        if self._options.num_top:
            told["input_top_logprobs"] = [self._top(each) for each in known]
            told["output_top_logprobs"] = [self._top(each) for each in grown.logprobs]
        return told

    def _entry(self, logprobs: TokenLogprobs | None, token: int) -> Entry:
        return self._triple(None if logprobs is None else logprobs.logprob, token)

    def _top(self, logprobs: TokenLogprobs | None) -> list[Entry] | None:
        if logprobs is None:
            return None
        return [*map(self._triple, logprobs.top_logprobs, logprobs.top_ids)]

    def _triple(self, logprob: float | None, token: int) -> Entry:
        text = self._tokenizer.token_text(token) if self._options.with_text else None
        return None if logprob is None else max(logprob, LEAST_LOGPROB), token, text
