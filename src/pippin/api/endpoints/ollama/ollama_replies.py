"""Ollama's endpoints that run the model: chat, generate, embed. Knows no field by name."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.dialects.ollama.ollama_reply import (
    HEARTBEAT,
    OllamaChat,
    OllamaGenerate,
    OllamaStream,
    nanoseconds,
    rfc3339,
)
from pippin.api.dialects.ollama.ollama_request import (
    LoadRequest,
    parse_embed,
    parse_generate,
    parse_ollama_chat,
)
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.embeddings import EmbeddingJob, embed, parse_embeddings
from pippin.api.endpoints.generation import answer
from pippin.api.fields.ollama import EMBED, EMBEDDINGS
from pippin.api.fields.table import FieldTable
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.sending import JSON_LINES, WholeResponse
from pippin.api.jobs.prepare import Job, prepare_chat, prepare_completion
from pippin.api.model_info import RequestRules
from pippin.api.requests.neutral_request import ChatRequest, CompletionRequest

Asked = ChatRequest | CompletionRequest | LoadRequest


class OllamaReplies:
    def __init__(self, state: AppState) -> None:
        self._state = state
        self._text, self._rules = state.text, state.rules

    def routes(self) -> list[Route]:
        posts = {
            "/api/chat": self._chat,
            "/api/generate": self._generate,
            "/api/embed": self._embed,
            "/api/embeddings": self._embeddings,
        }
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]

    async def _chat(self, request: Request) -> Response:
        job = await self._prepare(request, parse_ollama_chat)
        if isinstance(job, LoadRequest):
            return self._loaded(job, {"message": {"role": "assistant", "content": ""}})
        return self._answer(job, OllamaChat(job, self._text.tokenizer))

    async def _generate(self, request: Request) -> Response:
        job = await self._prepare(request, parse_generate)
        if isinstance(job, LoadRequest):
            return self._loaded(job, {"response": ""})
        return self._answer(job, OllamaGenerate(job, self._text.tokenizer))

    async def _embed(self, request: Request) -> Response:
        job, started = await self._prepare_embeddings(request, EMBED), perf_counter()

        async def reply() -> dict[str, Any]:
            vectors = await embed(job, self._state.engine)
            return {
                "model": self._rules.model.name,
                "embeddings": [vector.tolist() for vector in vectors],
                "total_duration": nanoseconds(perf_counter() - started),
                "load_duration": 0,
                "prompt_eval_count": job.prompt_tokens,
            }

        return WholeResponse(reply, job.timeout_s)

    async def _embeddings(self, request: Request) -> Response:
        job = await self._prepare_embeddings(request, EMBEDDINGS)

        async def reply() -> dict[str, Any]:
            (vector,) = await embed(job, self._state.engine)
            return {"embedding": vector.tolist()}

        return WholeResponse(reply, job.timeout_s)

    async def _prepare(
        self, request: Request, parse: Callable[[Any, RequestRules], Asked]
    ) -> Job | LoadRequest:
        def prepare(fields: Any) -> Job | LoadRequest:
            model = self._rules.model
            match parse(fields, self._rules):
                case ChatRequest() as chat:
                    return prepare_chat(chat, self._text, model)
                case CompletionRequest() as completion:
                    return prepare_completion(completion, self._text, model)
                case LoadRequest() as load:
                    return load

        return await self._state.prepare(request, prepare)

    async def _prepare_embeddings(self, request: Request, table: FieldTable) -> EmbeddingJob:
        def prepare(fields: Any) -> EmbeddingJob:
            renamed, truncate = parse_embed(fields, self._rules, table)
            return parse_embeddings(renamed, self._text, self._rules, truncate=truncate)

        return await self._state.prepare(request, prepare)

    def _answer(self, job: Job, dialect: OllamaStream) -> Response:
        engine = self._state.engine
        return answer(job, dialect, engine, media_type=JSON_LINES, heartbeat=lambda: HEARTBEAT)

    def _loaded(self, load: LoadRequest, said: dict[str, Any]) -> Response:
        head = {"model": self._rules.model.name, "created_at": rfc3339()}
        return JSONResponse({**head, **said, "done": True, "done_reason": load.done_reason})
