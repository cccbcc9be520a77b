"""The endpoints that take text or tokens, and those of stored responses. Knows no field by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.dialects.chat_completions import ChatDialect, parse_chat
from pippin.api.dialects.completions import CompletionsDialect, parse_completion
from pippin.api.dialects.dialect import Dialect, reply_events, whole_reply
from pippin.api.dialects.infill import InfillDialect, InfillRequest, parse_infill
from pippin.api.dialects.messages.message_reply import MessagesDialect
from pippin.api.dialects.messages.message_request import parse_message_request
from pippin.api.dialects.responses import response_request
from pippin.api.dialects.responses.response_reply import ResponsesDialect
from pippin.api.dialects.responses.response_store import ResponseStores, StoredTurn
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.embeddings import parse_embeddings, whole_embeddings
from pippin.api.endpoints.scoring import parse_rerank, parse_score, whole_rerank, whole_score
from pippin.api.endpoints.stored_responses import StoredResponses
from pippin.api.endpoints.tokenize import detokenize, tokenize
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.keys import owner_of
from pippin.api.http.request_log import record_of
from pippin.api.http.sending import EVENTS, HEARTBEAT, StreamResponse, WholeResponse
from pippin.api.jobs.prepare import Job, prepare_chat, prepare_completion, render_prompt
from pippin.api.model_info import RequestRules
from pippin.api.requests.neutral_request import ChatRequest
from pippin.engine.engine_client import Engine
from pippin.text.bundle import TextBundle

RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")  # Jina's, Cohere's, vLLM's
SCORE_PATHS = ("/v1/score", "/score")


class Generation:
    def __init__(self, state: AppState, stored: ResponseStores) -> None:
        self._state = state
        self._stored = stored
        self._text, self._rules = state.text, state.rules

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
        return [*routes, *StoredResponses(self._stored, self._rules).routes()]

    async def _chat_completions(self, request: Request) -> Response:
        job = await self._prepare_chat(request, parse_chat, "chatcmpl-")
        return self._answer(job, ChatDialect(job, self._text.tokenizer))

    async def _messages(self, request: Request) -> Response:
        job = await self._prepare_chat(request, parse_message_request, "msg_")
        dialect = MessagesDialect(job)
        return self._answer(job, dialect, heartbeat=dialect.ping)

    async def _completions(self, request: Request) -> Response:
        def prepare(fields: Any) -> Job:
            completion = parse_completion(fields, self._rules)
            return prepare_completion(completion, self._text, self._rules.model)

        job = await self._state.prepare(request, prepare)
        return self._answer(job, CompletionsDialect(job, self._text.tokenizer))

    async def _infill(self, request: Request) -> Response:
        read: list[InfillRequest] = []

        def prepare(fields: Any) -> Job:
            read.append(parse_infill(fields, self._rules))
            return prepare_completion(read[0].completion, self._text, self._rules.model)

        job = await self._state.prepare(request, prepare)
        return self._answer(job, InfillDialect(job, read[0], self._rules.model.max_len))

    async def _responses(self, request: Request) -> Response:
        stored = self._stored.of(owner_of(request.scope))
        read: list[response_request.ResponsesRequest] = []

        def parse(fields: Any, rules: RequestRules) -> ChatRequest:
            read.append(response_request.parse_responses_request(fields, rules, stored))
            return read[0].chat

        def keep(response: dict[str, Any]) -> bool:
            if not asked.store:
                return False
            turn = StoredTurn.of(asked.items, response["output"], asked.previous)
            return stored.put(response, turn)

        job = await self._prepare_chat(request, parse, "resp_")
        (asked,) = read
        return self._answer(job, ResponsesDialect(job, asked.echo, keep, asked.reasoning))

    async def _count_tokens(self, request: Request) -> Response:
        parse = partial(parse_message_request, counts_only=True)
        return JSONResponse({"input_tokens": await self._count(request, parse)})

    async def _input_tokens(self, request: Request) -> Response:
        stored = self._stored.of(owner_of(request.scope))

        def parse(fields: Any, rules: RequestRules) -> ChatRequest:
            return response_request.parse_counted_request(fields, rules, stored)

        counted = await self._count(request, parse)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted})

    async def _count(
        self, request: Request, parse: Callable[[Any, RequestRules], ChatRequest]
    ) -> int:
        rules = self._rules_of(request)

        def count(fields: Any) -> int:
            chat, max_bytes = parse(fields, rules), rules.model.max_counted_bytes
            num_tokens = len(render_prompt(chat, self._text, max_bytes).tokens)
            record_of(request.scope).ignored = chat.leniency.header()
            return num_tokens

        return await self._state.read(request, count)

    async def _embeddings(self, request: Request) -> Response:
        job = await self._state.prepare(
            request,
            lambda fields: parse_embeddings(self._rules.body(fields), self._text, self._rules),
        )
        engine, model = self._state.engine, self._rules.model
        return WholeResponse(lambda: whole_embeddings(job, engine, model), job.timeout_s)

    async def _rerank(self, request: Request) -> Response:
        job = await self._state.prepare(
            request, lambda fields: parse_rerank(fields, self._text, self._rules)
        )
        engine, model = self._state.engine, self._rules.model
        return WholeResponse(lambda: whole_rerank(job, engine, model), job.timeout_s)

    async def _score(self, request: Request) -> Response:
        job = await self._state.prepare(
            request, lambda fields: parse_score(fields, self._text, self._rules)
        )
        engine, model = self._state.engine, self._rules.model
        return WholeResponse(lambda: whole_score(job, engine, model), job.timeout_s)

    def _answering(self, work: Callable[[Any, TextBundle, RequestRules], dict[str, Any]]) -> Any:
        async def endpoint(request: Request) -> Response:
            return JSONResponse(
                await self._state.read(
                    request, lambda fields: work(fields, self._text, self._rules)
                )
            )

        return endpoint

    async def _prepare_chat(
        self, request: Request, parse: Callable[[Any, RequestRules], ChatRequest], prefix: str
    ) -> Job:
        rules = self._rules_of(request)

        def prepare(fields: Any) -> Job:
            chat = parse(fields, rules)
            return prepare_chat(chat, self._text, rules.model, prefix=prefix)

        return await self._state.prepare(request, prepare)

    def _rules_of(self, request: Request) -> RequestRules:
        return replace(self._rules, owner=owner_of(request.scope))

    def _answer(
        self, job: Job, dialect: Dialect, *, heartbeat: Callable[[], bytes] = lambda: HEARTBEAT
    ) -> Response:
        return answer(job, dialect, self._state.engine, heartbeat=heartbeat)


def answer(
    job: Job,
    dialect: Dialect,
    engine: Engine,
    *,
    media_type: str = EVENTS,
    heartbeat: Callable[[], bytes] = lambda: HEARTBEAT,
) -> Response:
    """The reply, whole or as a stream."""
    if not job.stream:
        return WholeResponse(lambda: whole_reply(job, dialect, engine), job.timeout_s)
    return StreamResponse(
        reply_events(job, dialect, engine),
        encode_error=dialect.error,
        timeout_s=job.timeout_s,
        media_type=media_type,
        heartbeat=heartbeat,
    )
