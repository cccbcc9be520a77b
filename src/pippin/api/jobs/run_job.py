"""A job: the sequences of one request, which run on an engine side by side, and their counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from pippin.api.requests.body import Leniency, under_owner
from pippin.api.requests.neutral_request import ChatRequest, CompletionRequest, ToolUse
from pippin.engine.engine_client import RequestEngine
from pippin.messages import Submit, TokenDelta
from pippin.sequences import GeneratedSequence, SequencePiece, ShownToken
from pippin.text.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    FoldedText,
    Reasoning,
    TextPiece,
)
from pippin.text.prompt import Prompt
from pippin.text.tokenizer import Tokenizer

TIERS = ("host", "disk", "peer")  # below the device's memory: where cached tokens came from


@dataclass
class JobTimes:
    """Times of a job's reply, in `time.perf_counter()` seconds."""

    submitted: float | None = None
    first: float | None = None  # piece of any sequence
    last: float | None = None


@dataclass(frozen=True)
class Job:
    id: str
    model: str
    created_s: int
    request: ChatRequest | CompletionRequest  # or a dialect's own, which has more for its reply
    prompts: list[Prompt]
    sequences: list[GeneratedSequence]  # those of one prompt side by side, as many for each
    stream: bool
    include_usage: bool
    timeout_s: float | None  # from being ready to the end of the reply
    tool_use: ToolUse
    leniency: Leniency
    timing: JobTimes = field(default_factory=JobTimes)

    @property
    def omitted(self) -> dict[str, list[str]]:
        """A field of the reply, where the model was not shown a picture or file of the prompt."""
        return {"omitted": self.leniency.omitted} if self.leniency.omitted else {}

    @property
    def with_logprobs(self) -> bool:
        return self.sequences[0].submit.params.logprobs is not None

    @property
    def keep_alive_s(self) -> float | None:
        return self.request.options.keep_alive_s

    def keep_apart(self, owner_salt: bytes) -> None:
        for sequence in self.sequences:
            sequence.submit = under_owner(sequence.submit, owner_salt)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def num_tokens(self) -> int:
        """Of the reply, so far."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    def num_cached(self, tier: str = "cached") -> int:
        """Prompt tokens that no sequence had to compute; or those of them from a lower tier."""
        num_each = len(self.sequences) // len(self.prompts)
        numbers = [getattr(sequence, f"{tier}_tokens") for sequence in self.sequences]
        return sum(min(numbers[i : i + num_each]) for i in range(0, len(numbers), num_each))

    def num_drafts(self, end: str) -> int:
        """`end`: accepted or rejected."""
        return sum(getattr(sequence, f"{end}_drafts") for sequence in self.sequences)

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """For one line of the log; with a tokenizer, the prompts in full."""
        times = self.timing
        waits = [s.queued_s for s in self.sequences if s.queued_s is not None]
        facts: dict[str, Any] = {
            "reply": self.id,
            "prompt_tokens": self.num_prompt_tokens,
            **{f"{tier}_tokens": self.num_cached(tier) for tier in ("cached", *TIERS)},
            "completion_tokens": self.num_tokens,
            **{f"{end}_drafts": self.num_drafts(end) for end in ("accepted", "rejected")},
            "queue_s": round(max(waits), 4) if waits else None,  # the longest
            "finish": ",".join(dict.fromkeys(s.finish or "cut" for s in self.sequences)),
        }
        if times.submitted is not None and times.first is not None and times.last is not None:
            facts["ttft_s"] = round(times.first - times.submitted, 4)
            if times.last > times.first:
                num_later = self.num_tokens - len(self.sequences)
                facts["tokens_per_s"] = round(num_later / (times.last - times.first), 1)
        if tokenizer is not None:
            texts = (map(tokenizer.token_bytes, prompt.tokens) for prompt in self.prompts)
            facts["prompts"] = [b"".join(text).decode(errors="replace") for text in texts]
        return facts


@dataclass
class FoldedChoice:
    index: int
    text: FoldedText = field(default_factory=FoldedText)
    shown: list[ShownToken] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # as they were generated
    finish: str | None = None

    def add(self, piece: SequencePiece) -> None:
        for part in piece.pieces:
            # A call that the end of the reply cut short stays a call, with the arguments so far.
            is_cut = isinstance(part, CallEnd) and part.unparsed is not None
            if piece.finish != "length" or not is_cut:
                self.text.add(part)
        self.shown += piece.shown
        self.tokens += piece.tokens
        self.finish = piece.finish

    @property
    def pieces(self) -> list[TextPiece]:
        """All of it in few. A call that was cut does not end."""
        pieces: list[TextPiece] = []
        if self.text.reasoning:
            pieces.append(Reasoning(self.text.reasoning))
        if self.text.content:
            pieces.append(Content(self.text.content))
        for number, call in self.text.calls.items():
            pieces += [CallBegin(number, call.id, call.name), CallArguments(number, call.arguments)]
            if self.finish != "length" or number != max(self.text.calls):
                pieces.append(CallEnd(number))
        return pieces

    def finish_or(self, called: str) -> str | None:
        """How it finished; `called`, if it did so to have functions called."""
        return called if self.finish == "stop" and self.text.calls else self.finish


async def run_sequences(engine: RequestEngine, job: Job) -> AsyncGenerator[SequencePiece, None]:
    """Pieces of all sequences as they arrive. Closing it aborts those that still run."""
    running = {sequence.submit.id: sequence for sequence in job.sequences}
    submits, times = [s.submit for s in job.sequences], job.timing
    times.submitted = perf_counter()
    deltas = engine.generate(submits[0]) if len(submits) == 1 else _merge(engine, submits)
    async with aclosing(deltas):
        async for delta in deltas:
            sequence = running.get(delta.id)
            if sequence is None:  # sent before the engine got `finish`
                continue
            piece = sequence.take(delta)
            times.last = perf_counter()
            if times.first is None:
                times.first = times.last
            if piece.finish is not None:
                del running[delta.id]
                if delta.finish is None:
                    engine.finish(delta.id)
            yield piece
            if not running:
                return


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
