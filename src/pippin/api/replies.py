"""Turns engine deltas into pieces of replies: text, tokens, finish. Knows no HTTP and no JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from pippin.api.engine_client import Engine
from pippin.api.http_errors import EngineFailure
from pippin.api.prepare import ChoiceSpec
from pippin.messages import Submit, TokenDelta
from pippin.text.detokenizer import Detokenizer, TokenSpan
from pippin.text.tokenizer import Tokenizer
from pippin.types import TokenLogprobs


@dataclass(frozen=True)
class ShownToken:
    """A token of the reply (or of the echoed prompt), for logprobs."""

    id: int
    offset: int  # characters before it in the choice's text
    logprobs: TokenLogprobs | None  # None: nothing predicted it, it is the very first


@dataclass(frozen=True)
class ReplyPiece:
    """The next part of one choice. The last one says how it finished."""

    index: int
    text: str
    tokens: list[ShownToken]
    finish: str | None = None
    is_first: bool = False


class Choice:
    """One choice as it grows: deltas in, pieces out."""

    def __init__(self, spec: ChoiceSpec, tokenizer: Tokenizer) -> None:
        params = spec.submit.params
        self.index = spec.index
        self.submit = spec.submit
        self.prompt = spec.prompt
        self.cached_tokens = 0
        self._hides_reply = spec.hides_reply
        self._wants_logprobs = params.logprobs is not None
        self._stop_ids = frozenset(spec.submit.stop_ids)
        self._detokenizer = Detokenizer(tokenizer, params.stop, min_tokens=params.min_tokens)
        self._logprobs: dict[int, TokenLogprobs] = {}  # by token index, until shown
        self._num_arrived = 0
        self._num_unseen = 0  # stop tokens: generated, not shown
        self._began = False

    @property
    def num_tokens(self) -> int:
        return 0 if self._hides_reply else self._detokenizer.num_tokens + self._num_unseen

    def take(self, delta: TokenDelta) -> ReplyPiece:
        """The delta's part of the reply; raises if the engine gave up on it."""
        if delta.finish in ("error", "abort"):
            raise EngineFailure(
                delta.error or "the engine aborted the request",
                code=delta.error_code or "aborted",
                status=delta.error_status if delta.finish == "error" else 503,
            )
        is_first, self._began = not self._began, True
        text, tokens = self._echo(delta) if is_first else ("", [])
        finish: str | None = delta.finish
        if self._hides_reply:
            finish = finish and "length"
        else:
            reply, spans = self._decode(delta)
            text += reply
            tokens += [self._shown(span) for span in spans if self._wants_logprobs]
            finish = "stop" if self._detokenizer.stopped else finish
        return ReplyPiece(self.index, text, tokens, finish, is_first)

    def _decode(self, delta: TokenDelta) -> tuple[str, list[TokenSpan]]:
        tokens = delta.tokens
        for i, logprobs in enumerate(delta.logprobs or ()):
            self._logprobs[self._num_arrived + i] = logprobs
        self._num_arrived += len(tokens)
        if delta.finish == "stop" and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]
            self._num_unseen = 1
        piece = self._detokenizer.feed(tokens)
        if delta.finish is None or self._detokenizer.stopped:
            return piece.text, piece.spans
        rest = self._detokenizer.close()
        return piece.text + rest.text, piece.spans + rest.spans

    def _shown(self, span: TokenSpan) -> ShownToken:
        base = len(self.prompt.echo.text) if self.prompt.echo else 0
        return ShownToken(span.id, base + span.start, self._logprobs.pop(span.index, None))

    def _echo(self, delta: TokenDelta) -> tuple[str, list[ShownToken]]:
        self.cached_tokens = delta.cached_tokens or 0
        echo = self.prompt.echo
        if echo is None:
            return "", []
        if not self._wants_logprobs:
            return echo.text, []
        logprobs = [None, *(delta.prompt_logprobs or ())]
        return echo.text, [
            ShownToken(id, offset, known)
            for id, offset, known in zip(echo.tokens, echo.offsets, logprobs, strict=True)
        ]


@dataclass
class FoldedChoice:
    """A whole choice, for replies that are not streamed."""

    index: int
    texts: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, piece: ReplyPiece) -> None:
        self.texts.append(piece.text)
        self.tokens += piece.tokens
        self.finish = piece.finish


async def run_choices(
    engine: Engine, choices: Sequence[Choice]
) -> AsyncGenerator[ReplyPiece, None]:
    """Pieces of all choices as they come. Closing it aborts whatever still runs."""
    running = {choice.submit.id: choice for choice in choices}
    async with aclosing(_deltas(engine, [choice.submit for choice in choices])) as deltas:
        async for delta in deltas:
            choice = running.get(delta.id)
            if choice is None:  # said before the engine heard of the stop string
                continue
            piece = choice.take(delta)
            if piece.finish is not None:
                del running[delta.id]
                if delta.finish is None:
                    engine.finish(delta.id)
            yield piece
            if not running:
                return


def _deltas(engine: Engine, submits: list[Submit]) -> AsyncGenerator[TokenDelta, None]:
    return engine.generate(submits[0]) if len(submits) == 1 else _merge(engine, submits)


async def _merge(engine: Engine, submits: list[Submit]) -> AsyncGenerator[TokenDelta, None]:
    queue: asyncio.Queue[TokenDelta | Exception] = asyncio.Queue()

    async def pump(submit: Submit) -> None:
        try:
            async with aclosing(engine.generate(submit)) as deltas:
                async for delta in deltas:
                    queue.put_nowait(delta)
        except Exception as error:  # raised again below, where the reply is made
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(submit)) for submit in submits]
    try:
        while True:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
