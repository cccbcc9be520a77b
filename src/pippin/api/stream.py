"""Sends a job's reply, as server-sent events or whole. Knows no tokens and no JSON of requests.

Both ways fold the same pieces. A client that goes away cancels the work, and closing the pieces
aborts what the engine still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pippin.api.engine_client import Engine
from pippin.api.http_errors import JSONResponse, error_body, error_response
from pippin.api.prepare import Job
from pippin.api.replies import FoldedChoice, run_sequences
from pippin.api.shapes import Shape
from pippin.errors import PippinError

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; nginx's number, for the log


class JobResponse(Response):
    """Runs a job when called. Before the first token an error is a status, later an event."""

    def __init__(self, job: Job, shape: Shape, engine: Engine) -> None:
        super().__init__()
        self._job = job
        self._shape = shape
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._job.stream:
            await _unless_disconnected(receive, self._send_events(scope, receive, send))
            return
        response = await _unless_disconnected(receive, self._whole())
        await (response or Response(status_code=CLIENT_CLOSED_REQUEST))(scope, receive, send)

    async def _whole(self) -> Response:
        folded = [FoldedChoice(sequence.index) for sequence in self._job.sequences]
        try:
            async with aclosing(run_sequences(self._engine, self._job.sequences)) as pieces:
                async for piece in pieces:
                    folded[piece.index].add(piece)
        except PippinError as error:
            return error_response(error)
        body = self._envelope(
            self._shape.whole_object, [self._shape.whole(choice) for choice in folded]
        )
        return JSONResponse(body | {"usage": self._usage()})

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    if not started:
                        started = True
                        await send(_EVENT_STREAM_START)
                    await _send_body(send, _sse(event))
        except PippinError as error:
            if not started:
                await error_response(error)(scope, receive, send)
                return
            await _send_body(send, _sse(error_body(error)))
        await _send_body(send, DONE, more=False)

    async def _events(self) -> AsyncGenerator[dict[str, Any], None]:
        usage = {"usage": None} if self._job.include_usage else {}
        async with aclosing(run_sequences(self._engine, self._job.sequences)) as pieces:
            async for piece in pieces:
                if piece.is_first and (opening := self._shape.opening(piece.index)) is not None:
                    yield self._envelope(self._shape.chunk_object, [opening]) | usage
                if piece.text or piece.shown or piece.finish:
                    part = self._shape.part(piece)
                    yield self._envelope(self._shape.chunk_object, [part]) | usage
        if self._job.include_usage:
            yield self._envelope(self._shape.chunk_object, []) | {"usage": self._usage()}

    def _envelope(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": object,
            "created": self._job.created_s,
            "model": self._job.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._job.prompts)
        completion_tokens = sum(sequence.num_tokens for sequence in self._job.sequences)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": _cached_tokens(self._job)},
        }


def _cached_tokens(job: Job) -> int:
    """Prompt tokens that no sequence had to compute."""
    cached = [sequence.cached_tokens for sequence in job.sequences]
    num_each = len(cached) // len(job.prompts)
    return sum(min(cached[i : i + num_each]) for i in range(0, len(cached), num_each))


_EVENT_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def _send_body(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None if the client left first, and then the work is cancelled."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
