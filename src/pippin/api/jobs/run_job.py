"""Runs a request's sequences on an engine, side by side. Knows no HTTP and no JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter

from pippin.api.jobs.prepare import Job
from pippin.engine.engine_client import RequestEngine
from pippin.messages import Submit, TokenDelta
from pippin.sequences import SequencePiece, ShownToken
from pippin.text.pieces import CallEnd, FoldedText, TextPiece


@dataclass
class FoldedChoice:
    index: int
    text: FoldedText = field(default_factory=FoldedText)
    shown: list[ShownToken] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # as they were generated
    finish: str | None = None

    def add(self, piece: SequencePiece) -> None:
        for part in piece.pieces:
            if piece.finish != "length" or not _is_cut(part):
                self.text.add(part)
        self.shown += piece.shown
        self.tokens += piece.tokens
        self.finish = piece.finish

    def finish_or(self, called: str) -> str | None:
        """How it finished; `called`, if it did so to have functions called."""
        return called if self.finish == "stop" and self.text.calls else self.finish


def _is_cut(part: TextPiece) -> bool:
    """A call that the end of the reply cut short stays a call, with the arguments so far."""
    return isinstance(part, CallEnd) and part.unparsed is not None


async def run_sequences(engine: RequestEngine, job: Job) -> AsyncGenerator[SequencePiece, None]:
    """Pieces of all sequences as they arrive. Closing it aborts those that still run."""
    running = {sequence.submit.id: sequence for sequence in job.sequences}
    job.timing.submitted = perf_counter()
    async with aclosing(_deltas(engine, [s.submit for s in job.sequences])) as deltas:
        async for delta in deltas:
            sequence = running.get(delta.id)
            if sequence is None:  # sent before the engine got `finish`
                continue
            piece = sequence.take(delta)
            job.timing.note(perf_counter())
            if piece.finish is not None:
                del running[delta.id]
                if delta.finish is None:
                    engine.finish(delta.id)
            yield piece
            if not running:
                return


def _deltas(engine: RequestEngine, submits: list[Submit]) -> AsyncGenerator[TokenDelta, None]:
    return engine.generate(submits[0]) if len(submits) == 1 else _merge(engine, submits)


async def _merge(engine: RequestEngine, submits: list[Submit]) -> AsyncGenerator[TokenDelta, None]:
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
