"""The endpoints that take text or tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pippin.api.dialects.chat_completions import ChatDialect, parse_chat
from pippin.api.dialects.completions import CompletionsDialect, parse_completion
from pippin.api.dialects.dialect import Dialect, reply_events, whole_reply
from pippin.api.dialects.infill import InfillDialect, parse_infill
from pippin.api.dialects.messages import MessagesDialect, parse_message_request
from pippin.api.dialects.responses import (
    ResponsesDialect,
    parse_counted_request,
    parse_responses_request,
)
from pippin.api.endpoints.app_state import AppState, Handler, Runnable
from pippin.api.http.access_control import owner_of
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.request_log import record_of
from pippin.api.http.sending import EVENTS, HEARTBEAT, StreamResponse, WholeResponse
from pippin.api.jobs.prepare import prepare_chat, prepare_completion, render_prompt
from pippin.api.jobs.run_job import Job
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.neutral_request import ChatRequest
from pippin.api.served_models import ModelLease, ServedText
from pippin.engine.engine_client import RequestEngine
from pippin.text.bundle import TextBundle

J = TypeVar("J", bound=Runnable)
ChatParser = Callable[[Any, RequestRules], ChatRequest]


async def chat_completions(state: AppState, request: Request) -> Response:
    job, lease = await _prepare_chat(state, request, parse_chat, "chatcmpl-")
    return answer(job, lease, ChatDialect(job, lease.served.text.tokenizer))


async def messages(state: AppState, request: Request) -> Response:
    job, lease = await _prepare_chat(state, request, parse_message_request, "msg_")
    dialect = MessagesDialect(job)
    return answer(job, lease, dialect, heartbeat=dialect.ping)


async def completions(state: AppState, request: Request) -> Response:
    def prepare(fields: Any, served: ServedText) -> Job:
        completion = parse_completion(fields, served.rules)
        return prepare_completion(completion, served.text, served.model)

    job, lease = await state.prepare(request, prepare)
    return answer(job, lease, CompletionsDialect(job, lease.served.text.tokenizer))


async def infill(state: AppState, request: Request) -> Response:
    def prepare(fields: Any, served: ServedText) -> Job:
        return prepare_completion(parse_infill(fields, served.rules), served.text, served.model)

    job, lease = await state.prepare(request, prepare)
    return answer(job, lease, InfillDialect(job, lease.served.model.max_len))


async def create_response(state: AppState, request: Request) -> Response:
    stored = state.stored.of(owner_of(request.scope))
    parse = partial(parse_responses_request, stored=stored)
    job, lease = await _prepare_chat(state, request, parse, "resp_")
    return answer(job, lease, ResponsesDialect(job, stored))


async def count_tokens(state: AppState, request: Request) -> Response:
    parse = partial(parse_message_request, counts_only=True)
    return JSONResponse({"input_tokens": await _count(state, request, parse)})


async def input_tokens(state: AppState, request: Request) -> Response:
    parse = partial(parse_counted_request, stored=state.stored.of(owner_of(request.scope)))
    counted = await _count(state, request, parse)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": counted})


async def _count(state: AppState, request: Request, parse: ChatParser) -> int:
    def count(fields: Any, served: ServedText) -> int:
        chat = parse(fields, _owned(served.rules, request))
        max_bytes = served.model.max_counted_bytes
        num_tokens = len(render_prompt(chat, served.text, max_bytes).tokens)
        record_of(request.scope).ignored = chat.leniency.header()
        return num_tokens

    return await state.read(request, count)


async def _prepare_chat(
    state: AppState, request: Request, parse: ChatParser, prefix: str
) -> tuple[Job, ModelLease]:
    def prepare(fields: Any, served: ServedText) -> Job:
        chat = parse(fields, _owned(served.rules, request))
        return prepare_chat(chat, served.text, served.model, prefix=prefix)

    return await state.prepare(request, prepare)


def _owned(rules: RequestRules, request: Request) -> RequestRules:
    return replace(rules, owner=owner_of(request.scope))


def read_by(work: Callable[[Any, TextBundle, RequestRules], dict[str, Any]]) -> Handler:
    """An endpoint that needs a model's text, and not its engine."""

    async def handle(state: AppState, request: Request) -> Response:
        return JSONResponse(
            await state.read(
                request, lambda fields, served: work(fields, served.text, served.rules)
            )
        )

    return handle


def answered_whole(
    parse: Callable[[Any, TextBundle, RequestRules], J],
    reply: Callable[[J, RequestEngine, ModelInfo], Awaitable[dict[str, Any]]],
) -> Handler:
    """An endpoint that needs an engine, and has no streams."""

    async def handle(state: AppState, request: Request) -> Response:
        job, lease = await state.prepare(
            request, lambda fields, served: parse(fields, served.text, served.rules)
        )
        return WholeResponse(lambda: reply(job, lease.engine, lease.served.model), job.timeout_s)

    return handle


def answer(
    job: Job,
    lease: ModelLease,
    dialect: Dialect,
    *,
    media_type: str = EVENTS,
    heartbeat: Callable[[], bytes] = lambda: HEARTBEAT,
) -> Response:
    """The reply, whole or as a stream."""
    if not job.stream:
        return WholeResponse(lambda: whole_reply(job, dialect, lease.engine), job.timeout_s)
    return StreamResponse(
        reply_events(job, dialect, lease.engine),
        encode_error=dialect.error,
        timeout_s=job.timeout_s,
        media_type=media_type,
        heartbeat=heartbeat,
    )
