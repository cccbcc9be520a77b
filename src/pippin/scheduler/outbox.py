"""What clients are owed: sampled tokens, and one terminal message each. Knows no channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pippin.backends.base import StepResult
from pippin.errors import PippinError
from pippin.messages import TokenDelta
from pippin.scheduler.request import Request
from pippin.types import FinishReason


class Outbox:
    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []

    def __len__(self) -> int:
        return len(self._deltas)

    def take(self) -> list[TokenDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def tokens(
        self,
        request: Request,
        slot: int,
        tokens: list[int],
        result: StepResult,
        finish: FinishReason | None,
    ) -> None:
        """Sampled tokens, and those that a grammar forces after them.

        The reply's first also says what the cache saved and scores the prompt.
        """
        scored = result.logprobs.get(slot)
        logprobs = None if scored is None else list(scored)
        if len(request.output) > len(tokens):
            self._deltas.append(
                TokenDelta(
                    request.id,
                    tokens,
                    logprobs,
                    accepted_drafts=request.accepted_drafts,
                    rejected_drafts=request.rejected_drafts,
                    finish=finish,
                )
            )
            return
        scores = result.prompt_logprobs.get(slot)
        prompt_logprobs = None if scores is None else list(scores)
        self._first(
            request,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish=finish,
        )

    def embedding(self, request: Request, vector: np.ndarray) -> None:
        """The reply to a request that embeds. `vector`: float32 [hidden]."""
        self._first(request, embedding=vector.tobytes(), finish="stop")

    def _first(self, request: Request, **fields: Any) -> None:
        self._deltas.append(
            TokenDelta(
                id=request.id,
                cached_tokens=request.cached_len,
                host_tokens=request.host_len,
                disk_tokens=request.disk_len,
                peer_tokens=request.peer_len,
                queued_s=request.queued_s,
                **fields,
            )
        )

    def end(
        self, request: Request, finish: FinishReason | None, tokens: Sequence[int] = ()
    ) -> None:
        """Its last tokens, which no step has sampled; without `finish` more follow."""
        self._deltas.append(
            TokenDelta(
                request.id,
                list(tokens),
                accepted_drafts=request.accepted_drafts,
                rejected_drafts=request.rejected_drafts,
                finish=finish,
            )
        )

    def error(self, request_id: str, error: Exception) -> None:
        code, status, param = "internal_error", 500, None
        if isinstance(error, PippinError):
            code, status, param = error.code, error.status, error.param
        self._deltas.append(
            TokenDelta(
                id=request_id,
                finish="error",
                error=str(error) or repr(error),
                error_code=code,
                error_status=status,
                error_param=param,
            )
        )
