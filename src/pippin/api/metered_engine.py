"""An engine whose replies are timed, for Prometheus.

A request here is one sequence of the engine: a client's request for n choices counts n times. It is
timed from its submission to the arrival of its tokens in this process: what a client sees, without
the time to read its request and to write the reply.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from pippin.engine.engine_client import RequestEngine
from pippin.messages import Submit, TokenDelta
from pippin.types import FinishReason

WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 5)
WHOLE_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
SUCCESS: tuple[FinishReason, ...] = ("stop", "length")
LENGTH_BUCKETS = tuple(4**n for n in range(10))  # 1 to 262,144 tokens

ABORT: FinishReason = "abort"  # the client disconnected, or its request timed out


class ReplyTimes:
    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, buckets=buckets, registry=registry)

        self.queue = histogram(
            "pippin_request_queue_time_seconds",
            "Seconds that a request waited in the engine's queue before its first chunk.",
            WAIT_BUCKETS,
        )
        self.first_token = histogram(
            "pippin_time_to_first_token_seconds",
            "Seconds from submitting a request to the engine to its first token.",
            WAIT_BUCKETS,
        )
        self.inter_token = histogram(
            "pippin_inter_token_latency_seconds",
            "Seconds between successive tokens of a request; tokens of one step count as one.",
            GAP_BUCKETS,
        )
        self.whole = histogram(
            "pippin_e2e_request_latency_seconds",
            "Seconds from submitting a request to the engine to its end.",
            WHOLE_BUCKETS,
        )
        self.prompt_tokens = histogram(
            "pippin_request_prompt_tokens", "Number of prompt tokens of a request.", LENGTH_BUCKETS
        )
        self.generation_tokens = histogram(
            "pippin_request_generation_tokens",
            "Number of generated tokens of a request.",
            LENGTH_BUCKETS,
        )
        counter = partial(Counter, labelnames=["finished_reason"], registry=registry)
        self.requests = counter(
            "pippin_requests", "Number of requests that ended, by finish reason."
        )
        self.successes = counter(
            "pippin_request_success",
            "Number of requests that ended with a complete reply, by finish reason.",
        )
        # Samples start at 0, so that `rate()` sees the first request of each reason.
        for reason in get_args(FinishReason):
            self.requests.labels(reason)
        for reason in SUCCESS:
            self.successes.labels(reason)


class MeteredEngine:
    """The same engine, with its replies timed."""

    def __init__(self, engine: RequestEngine, times: ReplyTimes) -> None:
        self._engine = engine
        self._times = times
        self._open: dict[str, _TimedRequest] = {}

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        request = self._open[submit.id] = _TimedRequest(self._times, submit.prompt_len)
        try:
            async with aclosing(self._engine.generate(submit)) as deltas:
                async for delta in deltas:
                    request.note(delta)
                    if delta.finish is not None:
                        self._end(submit.id, delta.finish)
                    yield delta
        finally:
            self._end(submit.id, ABORT)

    def finish(self, id: str) -> None:
        self._end(id, "stop")  # by a stop string, which the engine does not report
        self._engine.finish(id)

    def _end(self, id: str, finish: FinishReason) -> None:
        if (request := self._open.pop(id, None)) is not None:
            request.end(finish)


class _TimedRequest:
    def __init__(self, times: ReplyTimes, prompt_len: int) -> None:
        self._times = times
        self._began = perf_counter()
        self._last: float | None = None  # when its latest tokens arrived
        self._num_tokens = 0
        times.prompt_tokens.observe(prompt_len)

    def note(self, delta: TokenDelta) -> None:
        if delta.queued_s is not None:
            self._times.queue.observe(delta.queued_s)
        if not delta.tokens:
            return
        now = perf_counter()
        if self._last is None:
            self._times.first_token.observe(now - self._began)
        else:
            self._times.inter_token.observe(now - self._last)
        self._last = now
        self._num_tokens += len(delta.tokens)

    def end(self, finish: FinishReason) -> None:
        self._times.whole.observe(perf_counter() - self._began)
        self._times.generation_tokens.observe(self._num_tokens)
        self._times.requests.labels(finish).inc()
        if finish in SUCCESS:
            self._times.successes.labels(finish).inc()
