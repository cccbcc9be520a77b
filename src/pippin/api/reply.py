"""A job's reply in OpenAI's words: events, or one object. Knows no HTTP and no JSON of requests.

Both ways fold the same pieces; closing them aborts what the engine still runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from pippin.api.engine_client import Engine
from pippin.api.prepare import Job
from pippin.api.replies import FoldedChoice, run_sequences
from pippin.api.shapes import Shape

DONE = b"data: [DONE]\n\n"


class OpenAIReply:
    def __init__(self, job: Job, shape: Shape, engine: Engine) -> None:
        self._job = job
        self._shape = shape
        self._engine = engine

    async def whole(self) -> dict[str, Any]:
        folded = [FoldedChoice(sequence.index) for sequence in self._job.sequences]
        async with aclosing(run_sequences(self._engine, self._job)) as pieces:
            async for piece in pieces:
                folded[piece.index].add(piece)
        choices = [self._shape.whole(choice) for choice in folded]
        return self._envelope(self._shape.whole_object, choices) | {"usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        usage = {"usage": None} if self._job.include_usage else {}
        async with aclosing(run_sequences(self._engine, self._job)) as pieces:
            async for piece in pieces:
                if piece.is_first and (opening := self._shape.opening(piece.index)) is not None:
                    yield as_event(self._envelope(self._shape.chunk_object, [opening]) | usage)
                if piece.text or piece.shown or piece.finish:
                    part = self._shape.part(piece)
                    yield as_event(self._envelope(self._shape.chunk_object, [part]) | usage)
        if self._job.include_usage:
            last = self._envelope(self._shape.chunk_object, []) | {"usage": self._usage()}
            yield as_event(last)

    def _envelope(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": object,
            "created": self._job.created_s,
            "model": self._job.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt_tokens, completion_tokens = self._job.prompt_tokens, self._job.completion_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._job.cached_tokens},
        }


def as_event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
