"""The endpoints that take text or tokens, and those of stored responses. Knows no field by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.dialects.chat_completions import ChatDialect, parse_chat
from pippin.api.dialects.completions import CompletionsDialect, parse_completion
from pippin.api.dialects.dialect import Dialect, reply_events, whole_reply
from pippin.api.dialects.infill import InfillDialect, parse_infill
from pippin.api.dialects.messages import MessagesDialect, parse_message_request
from pippin.api.dialects.response_store import ResponseStores
from pippin.api.dialects.responses import (
    ResponsesDialect,
    parse_counted_request,
    parse_responses_request,
)
from pippin.api.endpoints.app_state import AppState, Prepared, Runnable
from pippin.api.endpoints.embeddings import parse_embeddings, whole_embeddings
from pippin.api.endpoints.scoring import parse_rerank, parse_score, whole_rerank, whole_score
from pippin.api.endpoints.stored_responses import StoredResponses
from pippin.api.endpoints.tokenize import detokenize, tokenize
from pippin.api.fields.openai import EMBEDDINGS
from pippin.api.http.access_control import owner_of
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.request_log import record_of
from pippin.api.http.sending import EVENTS, HEARTBEAT, StreamResponse, WholeResponse
from pippin.api.jobs.prepare import prepare_chat, prepare_completion, render_prompt
from pippin.api.jobs.run_job import Job
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.neutral_request import ChatRequest
from pippin.api.served_models import ServedText
from pippin.engine.engine_client import Engine
from pippin.text.bundle import TextBundle

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")  # Jina's, Cohere's, vLLM's
SCORE_PATHS = ("/v1/score", "/score")
S = TypeVar("S", bound=Runnable)


class Generation:
    def __init__(self, state: AppState, stored: ResponseStores) -> None:
        self._state = state
        self._stored = stored

    def routes(self) -> list[Route]:
        posts = {
            "/v1/chat/completions": self._chat_completions,
            "/v1/completions": self._completions,
            "/infill": self._infill,
            "/v1/responses": self._responses,
            "/v1/responses/input_tokens": self._input_tokens,
            "/v1/messages": self._messages,
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/embeddings": self._embeddings,
            **dict.fromkeys(RERANK_PATHS, self._rerank),
            **dict.fromkeys(SCORE_PATHS, self._score),
            "/tokenize": self._answering(tokenize),
            "/detokenize": self._answering(detokenize),
        }
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
        return [*routes, *StoredResponses(self._stored, self._state.rules).routes()]

    async def _chat_completions(self, request: Request) -> Response:
        found = await self._prepare_chat(request, parse_chat, "chatcmpl-")
        return answer(found, ChatDialect(found.job, found.text.tokenizer))

    async def _messages(self, request: Request) -> Response:
        found = await self._prepare_chat(request, parse_message_request, "msg_")
        dialect = MessagesDialect(found.job)
        return answer(found, dialect, heartbeat=dialect.ping)

    async def _completions(self, request: Request) -> Response:
        def prepare(fields: Any, served: ServedText) -> Job:
            completion = parse_completion(fields, served.rules)
            return prepare_completion(completion, served.text, served.model)

        found = await self._state.prepare(request, prepare)
        return answer(found, CompletionsDialect(found.job, found.text.tokenizer))

    async def _infill(self, request: Request) -> Response:
        def prepare(fields: Any, served: ServedText) -> Job:
            return prepare_completion(parse_infill(fields, served.rules), served.text, served.model)

        found = await self._state.prepare(request, prepare)
        return answer(found, InfillDialect(found.job, found.model.max_len))

    async def _responses(self, request: Request) -> Response:
        stored = self._stored.of(owner_of(request.scope))
        parse = partial(parse_responses_request, stored=stored)
        found = await self._prepare_chat(request, parse, "resp_")
        return answer(found, ResponsesDialect(found.job, stored))

    async def _count_tokens(self, request: Request) -> Response:
        parse = partial(parse_message_request, counts_only=True)
        return JSONResponse({"input_tokens": await self._count(request, parse)})

    async def _input_tokens(self, request: Request) -> Response:
        stored = self._stored.of(owner_of(request.scope))

        parse = partial(parse_counted_request, stored=stored)
        counted = await self._count(request, parse)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted})

    async def _count(
        self, request: Request, parse: Callable[[Any, RequestRules], ChatRequest]
    ) -> int:
        def count(fields: Any, served: ServedText) -> int:
            chat = parse(fields, _owned(served.rules, request))
            max_bytes = served.model.max_counted_bytes
            num_tokens = len(render_prompt(chat, served.text, max_bytes).tokens)
            record_of(request.scope).ignored = chat.leniency.header()
            return num_tokens

        return await self._state.read(request, count)

    async def _embeddings(self, request: Request) -> Response:
        found = await self._state.prepare(
            request,
            lambda fields, served: parse_embeddings(
                EMBEDDINGS.read(fields, served.rules), served.text, served.rules
            ),
        )
        return _whole(found, whole_embeddings)

    async def _rerank(self, request: Request) -> Response:
        found = await self._state.prepare(
            request, lambda fields, served: parse_rerank(fields, served.text, served.rules)
        )
        return _whole(found, whole_rerank)

    async def _score(self, request: Request) -> Response:
        found = await self._state.prepare(
            request, lambda fields, served: parse_score(fields, served.text, served.rules)
        )
        return _whole(found, whole_score)

    def _answering(self, work: Callable[[Any, TextBundle, RequestRules], dict[str, Any]]) -> Any:
        async def endpoint(request: Request) -> Response:
            return JSONResponse(
                await self._state.read(
                    request, lambda fields, served: work(fields, served.text, served.rules)
                )
            )

        return endpoint

    async def _prepare_chat(
        self, request: Request, parse: Callable[[Any, RequestRules], ChatRequest], prefix: str
    ) -> Prepared[Job]:
        def prepare(fields: Any, served: ServedText) -> Job:
            chat = parse(fields, _owned(served.rules, request))
            return prepare_chat(chat, served.text, served.model, prefix=prefix)

        return await self._state.prepare(request, prepare)


def _owned(rules: RequestRules, request: Request) -> RequestRules:
    return replace(rules, owner=owner_of(request.scope))


def _whole(
    found: Prepared[S], reply: Callable[[S, Engine, ModelInfo], Awaitable[dict[str, Any]]]
) -> Response:
    job = found.job
    return WholeResponse(lambda: reply(job, found.engine, found.model), job.timeout_s)


def answer(
    found: Prepared[Job],
    dialect: Dialect,
    *,
    media_type: str = EVENTS,
    heartbeat: Callable[[], bytes] = lambda: HEARTBEAT,
) -> Response:
    """The reply, whole or as a stream."""
    job, engine = found.job, found.engine
    if not job.stream:
        return WholeResponse(lambda: whole_reply(job, dialect, engine), job.timeout_s)
    return StreamResponse(
        reply_events(job, dialect, engine),
        encode_error=dialect.error,
        timeout_s=job.timeout_s,
        media_type=media_type,
        heartbeat=heartbeat,
    )
