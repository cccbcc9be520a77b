"""An engine whose replies are timed, for Prometheus. Knows no HTTP, no text and no dialect.

Times are those of one sequence, from being handed to the engine to its tokens' arrival in this
process: what a client sees, but for reading its request and writing the reply.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from pippin.engine.engine_client import Engine
from pippin.engine.watchers import WatchEvent
from pippin.messages import Submit, TokenDelta

WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5)
WHOLE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
LENGTH_BUCKETS = tuple(4**n for n in range(10))  # 1 to 262,144 tokens

CUT = "cut"  # nobody waited for the end: the client left, or its time was over


class ReplyTimes:
    """The histograms, in a registry of their own app."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.queue = Histogram(
            "pippin_queue_seconds",
            "From the engine's having a sequence to its first chunk.",
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self.first_token = Histogram(
            "pippin_time_to_first_token_seconds",
            "From submitting a sequence to its first token.",
            buckets=WAIT_BUCKETS,
            registry=registry,
        )
        self.gap = Histogram(
            "pippin_token_gap_seconds",
            "Between tokens of a sequence that follow each other (those that come together count "
            "as one).",
            buckets=GAP_BUCKETS,
            registry=registry,
        )
        self.whole = Histogram(
            "pippin_sequence_seconds",
            "From submitting a sequence to its end.",
            buckets=WHOLE_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Histogram(
            "pippin_sequence_prompt_tokens",
            "Prompt tokens of a sequence.",
            buckets=LENGTH_BUCKETS,
            registry=registry,
        )
        self.reply_tokens = Histogram(
            "pippin_sequence_reply_tokens",
            "Generated tokens of a sequence.",
            buckets=LENGTH_BUCKETS,
            registry=registry,
        )
        self.sequences = Counter(
            "pippin_sequences",
            "Sequences that are over, by how they ended.",
            ["finish"],
            registry=registry,
        )


class MeteredEngine:
    """The same engine; what it says of each sequence is timed on the way."""

    def __init__(self, engine: Engine, times: ReplyTimes) -> None:
        self._engine = engine
        self._times = times
        self._open: dict[str, _TimedSequence] = {}

    @property
    def healthy(self) -> bool:
        return self._engine.healthy

    @property
    def reason(self) -> str | None:
        return self._engine.reason

    def check_ready(self) -> None:
        self._engine.check_ready()

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        sequence = self._open[submit.id] = _TimedSequence(self._times, len(submit.tokens))
        try:
            async with aclosing(self._engine.generate(submit)) as deltas:
                async for delta in deltas:
                    sequence.note(delta)
                    if delta.finish is not None:
                        self._end(submit.id, delta.finish)
                    yield delta
        finally:
            self._end(submit.id, CUT)

    def abort(self, id: str) -> None:
        self._engine.abort(id)

    def finish(self, id: str) -> None:
        self._end(id, "stop")  # by a stop string: the engine will not say so
        self._engine.finish(id)

    async def status(self) -> dict[str, Any]:
        return await self._engine.status()

    async def counters(self) -> dict[str, Any]:
        return await self._engine.counters()

    async def flush_cache(self) -> dict[str, Any]:
        return await self._engine.flush_cache()

    def watch(self) -> AsyncGenerator[WatchEvent, None]:
        return self._engine.watch()

    async def node(self, node: int) -> dict[str, Any]:
        return await self._engine.node(node)

    def _end(self, id: str, finish: str) -> None:
        """Unless it has ended before."""
        if (sequence := self._open.pop(id, None)) is not None:
            sequence.end(finish)


class _TimedSequence:
    def __init__(self, times: ReplyTimes, prompt_len: int) -> None:
        self._times = times
        self._began = perf_counter()
        self._last: float | None = None  # when its latest tokens came
        self._num_tokens = 0
        times.prompt_tokens.observe(prompt_len)

    def note(self, delta: TokenDelta) -> None:
        if delta.queued_s is not None:
            self._times.queue.observe(delta.queued_s)
        if delta.tokens:
            self._note_tokens(len(delta.tokens))

    def _note_tokens(self, count: int) -> None:
        now = perf_counter()
        if self._last is None:
            self._times.first_token.observe(now - self._began)
        else:
            self._times.gap.observe(now - self._last)
        self._last = now
        self._num_tokens += count

    def end(self, finish: str) -> None:
        self._times.whole.observe(perf_counter() - self._began)
        self._times.reply_tokens.observe(self._num_tokens)
        self._times.sequences.labels(finish).inc()
