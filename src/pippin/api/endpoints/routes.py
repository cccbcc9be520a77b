"""The endpoints of this package as routes. Knows no field of any request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.endpoints.dialect_schemas import query_schemas
from pippin.api.endpoints.embeddings import EmbeddingReply, parse_embeddings
from pippin.api.endpoints.events import EventsEndpoint
from pippin.api.endpoints.field_schemas import request_schemas
from pippin.api.endpoints.metrics_endpoint import MetricsEndpoint
from pippin.api.endpoints.openapi import openapi_document
from pippin.api.endpoints.tokenize import detokenize, tokenize
from pippin.api.http.access_control import owner_salt_of
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.read_body import decode_body, read_body
from pippin.api.http.request_log import record_of
from pippin.api.http.sending import WholeResponse
from pippin.api.http.workers import Workers
from pippin.api.model_info import ModelInfo
from pippin.config import LimitsConfig, ServerConfig
from pippin.engine.engine_client import Engine
from pippin.text.bundle import TextBundle

TextWork = Callable[[Any, TextBundle, ModelInfo], dict[str, Any]]


class Endpoints:
    """Bound to one engine and one model."""

    def __init__(
        self,
        engine: Engine,
        text: TextBundle,
        config: ServerConfig,
        model: ModelInfo,
        limits: LimitsConfig,
        registry: CollectorRegistry,
    ) -> None:
        self._engine = engine
        self._text = text
        self._model = model
        self._limits = limits
        self._needs_key = bool(config.api_key)
        self._metrics = MetricsEndpoint(engine, registry)
        self._events = EventsEndpoint(engine, text.tokenizer, config)
        self._workers = Workers()

    def routes(self) -> list[Route]:
        return [
            Route("/metrics", self._metrics.show),
            *self._events.routes(),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/get_model_info", self.model_info),
            Route("/model_info", self.model_info),  # SGLang's newer name of it
            Route("/openapi.json", self.openapi),
        ]

    async def embeddings(self, request: Request) -> Response:
        self._engine.check_ready()
        body = await read_body(request, self._limits)
        job = await self._workers.run(
            lambda body: parse_embeddings(decode_body(body), self._text, self._model, self._limits),
            body,
        )
        job.keep_apart(owner_salt_of(request.scope))
        record_of(request.scope).facts = lambda: {"prompt_tokens": job.prompt_tokens}
        return WholeResponse(EmbeddingReply(job, self._engine, self._model).whole, job.timeout_s)

    async def tokenize(self, request: Request) -> Response:
        return await self._answer_text(request, tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer_text(request, detokenize)

    async def model_info(self, request: Request) -> Response:
        """Names, not paths: where a server keeps its files is nobody's business."""
        return JSONResponse(
            {
                "model_path": self._model.name,
                "tokenizer_path": self._model.name,
                "served_model_name": self._model.name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "max_model_len": self._model.max_len,
                "vocab_size": self._model.vocab_size,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def openapi(self, request: Request) -> Response:
        bodies = request_schemas(self._model, self._limits)
        routes = request.app.routes
        document = openapi_document(routes, bodies, query_schemas(), needs_key=self._needs_key)
        return JSONResponse(document)

    async def _answer_text(self, request: Request, work: TextWork) -> Response:
        body = await read_body(request, self._limits)
        return JSONResponse(
            await self._workers.run(
                lambda body: work(decode_body(body), self._text, self._model), body
            )
        )
