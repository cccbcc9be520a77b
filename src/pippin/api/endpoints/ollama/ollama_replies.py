"""Ollama's endpoints that run the model: chat, generate, embed. Knows no field by name."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

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
from pippin.api.endpoints.app_state import AppState, Prepared, Runnable
from pippin.api.endpoints.embeddings import EmbeddingJob, embed, parse_embeddings
from pippin.api.endpoints.generation import answer
from pippin.api.fields.ollama import EMBED, EMBEDDINGS
from pippin.api.fields.table import FieldTable
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.request_log import record_of
from pippin.api.http.sending import JSON_LINES, WholeResponse
from pippin.api.jobs.prepare import Job, prepare_chat, prepare_completion
from pippin.api.model_info import RequestRules, spread
from pippin.api.requests.neutral_request import ChatRequest, CompletionRequest
from pippin.api.served_models import ServedText
from pippin.durations import FOR_EVER, parse_duration
from pippin.text.tokenizer import Tokenizer

Asked = ChatRequest | CompletionRequest | LoadRequest
R = TypeVar("R", bound=Runnable)


class _Unload(Exception):
    """A request that needs no engine: its model is not loaded to be unloaded."""

    def __init__(self, load: LoadRequest, name: str) -> None:
        self.load, self.name = load, name


class OllamaReplies:
    def __init__(self, state: AppState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        posts = {
            "/api/chat": self._chat,
            "/api/generate": self._generate,
            "/api/embed": self._embed,
            "/api/embeddings": self._embeddings,
        }
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]

    async def _chat(self, request: Request) -> Response:
        return await self._reply(
            request,
            parse_ollama_chat,
            OllamaChat,
            {"message": {"role": "assistant", "content": ""}},
        )

    async def _generate(self, request: Request) -> Response:
        return await self._reply(request, parse_generate, OllamaGenerate, {"response": ""})

    async def _reply(
        self,
        request: Request,
        parse: Callable[[Any, RequestRules], Asked],
        dialect: Callable[[Job, Tokenizer, float], OllamaStream],
        empty: dict[str, Any],
    ) -> Response:
        def prepare(fields: Any, served: ServedText) -> Job | LoadRequest:
            match parse(fields, served.rules):
                case ChatRequest() as chat:
                    return prepare_chat(chat, served.text, served.model)
                case CompletionRequest() as completion:
                    return prepare_completion(completion, served.text, served.model)
                case LoadRequest(done_reason="unload") as load if served.model.on_demand:
                    raise _Unload(load, served.model.name)
                case LoadRequest() as load:
                    return load

        try:
            found = await self._prepare(request, prepare)
        except _Unload as unload:
            self._state.admins.check(request.scope)
            self._state.models.get(unload.name).keep_alive(0.0)
            record_of(request.scope).ignored = unload.load.leniency.header()
            return _without_text(unload.name, unload.load, empty)
        if isinstance(found.job, LoadRequest):
            return _without_text(found.model.name, found.job, empty)
        stream = dialect(found.job, found.text.tokenizer, found.waited_s)
        return answer(
            found.with_job(found.job), stream, media_type=JSON_LINES, heartbeat=lambda: HEARTBEAT
        )

    async def _embed(self, request: Request) -> Response:
        started = perf_counter()
        found = await self._prepare_embeddings(request, EMBED)
        job = found.job

        async def reply() -> dict[str, Any]:
            vectors = await embed(job, found.engine)
            return {
                "model": found.model.name,
                "embeddings": [vector.tolist() for vector in vectors],
                "total_duration": nanoseconds(perf_counter() - started),
                "load_duration": nanoseconds(found.waited_s),
                "prompt_eval_count": job.prompt_tokens,
            }

        return WholeResponse(reply, job.timeout_s)

    async def _embeddings(self, request: Request) -> Response:
        found = await self._prepare_embeddings(request, EMBEDDINGS)

        async def reply() -> dict[str, Any]:
            (vector,) = await embed(found.job, found.engine)
            return {"embedding": vector.tolist()}

        return WholeResponse(reply, found.job.timeout_s)

    async def _prepare_embeddings(
        self, request: Request, table: FieldTable
    ) -> Prepared[EmbeddingJob]:
        def prepare(fields: Any, served: ServedText) -> EmbeddingJob:
            renamed, truncate = parse_embed(fields, served.rules, table)
            return parse_embeddings(renamed, served.text, served.rules, truncate=truncate)

        return await self._prepare(request, prepare)

    async def _prepare(self, request: Request, work: Callable[[Any, ServedText], R]) -> Prepared[R]:
        """`keep_alive` counts from the end of this request. It is every client's model, so where
        keys are set an admin's `keep_alive` alone has an effect."""
        given: list[Any] = [None]
        is_admin = self._state.admins.admit(request.scope)

        def noting(fields: Any, served: ServedText) -> R:
            job = work(fields, served)
            keep_alive = spread(fields).get("keep_alive")
            if is_admin:
                given[:] = [keep_alive]
            elif keep_alive is not None and served.model.on_demand:
                job.leniency.ignore("keep_alive", "it needs an admin key (--admin-key)")
            return job

        found = await self._state.prepare(request, noting)
        if (seconds := parse_duration(given[0])) is not None:
            found.entry.keep_alive(None if seconds == FOR_EVER else seconds)
        return found


def _without_text(name: str, load: LoadRequest, empty: dict[str, Any]) -> Response:
    head = {"model": name, "created_at": rfc3339()}
    return JSONResponse({**head, **empty, "done": True, "done_reason": load.done_reason})
