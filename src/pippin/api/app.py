"""Puts the HTTP server together. Knows no scheduler, no arrays and no field of any request."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.batches.routes import BatchRoutes, FileRoutes, create_batches
from pippin.api.batches.runner import Batches, BatchMetrics
from pippin.api.dialects.messages import messages_error
from pippin.api.dialects.ollama import ollama_error
from pippin.api.dialects.response_store import ResponseStores
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.events import EventsEndpoint
from pippin.api.endpoints.generation import Generation
from pippin.api.endpoints.metrics_endpoint import MetricsEndpoint, ModelMetrics
from pippin.api.endpoints.ollama import OllamaDownloads, OllamaModels, OllamaReplies
from pippin.api.endpoints.server_info import ServerInfo
from pippin.api.http.access_control import access_checks, known_keys
from pippin.api.http.http_errors import ERROR_HANDLERS, ErrorShapes, error_response
from pippin.api.http.request_log import RequestLog
from pippin.api.metered_engine import MeteredEngine
from pippin.api.page.routes import page_paths, page_routes
from pippin.api.served_models import ServedModels
from pippin.config import LimitsConfig, ServerConfig
from pippin.errors import NotReady, PippinError

LOCAL_PATHS = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/infill"),
        *("/v1/responses", "/v1/responses/input_tokens"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
        *("/tokenize", "/detokenize"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
        *("/api/show", "/api/tags", "/api/ps", "/api/version"),
        *("/v1/models", "/health", "/ready"),
    }
)
_ONE_MODEL = "/v1/models/"


def is_local_path(path: str) -> bool:
    return path in LOCAL_PATHS or path.startswith(_ONE_MODEL)


FIRST_PARTS = frozenset(
    {
        *("chat", "completions", "responses", "messages", "embeddings", "models"),
        *("files", "batches"),
    }
)


class UnversionedPaths:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _first_part(scope["path"]) in FIRST_PARTS:
            scope = {**scope, "path": f"/v1{scope['path']}"}
        await self._app(scope, receive, send)


def _first_part(path: str) -> str:
    return path.removeprefix("/").partition("/")[0]


log = logging.getLogger(__name__)


def create_app(models: ServedModels, config: ServerConfig, limits: LimitsConfig) -> Application:
    registry = CollectorRegistry()
    metrics = ModelMetrics(models)
    state = AppState(
        models,
        config,
        limits,
        use=lambda model, engine: MeteredEngine(engine, metrics.times(model.info.name)),
    )
    num_owners = max(1, len(known_keys(config)))
    stored = ResponseStores(config.stored_responses, config.stored_bytes, num_owners)
    batches = create_batches(state, BatchMetrics(registry))
    app = Starlette(
        routes=[
            *Generation(state, stored).routes(),
            *FileRoutes(batches, state).routes(),
            *BatchRoutes(state, batches).routes(),
            *OllamaReplies(state).routes(),
            *OllamaModels(state).routes(),
            *OllamaDownloads(state).routes(),
            *ServerInfo(state).routes(),
            Route("/metrics", MetricsEndpoint(models, metrics, registry).show),
            *EventsEndpoint(state).routes(),
            *(page_routes() if config.page else ()),
        ],
        middleware=access_checks(
            config,
            public=page_paths() if config.page else frozenset(),
            for_local_pages=is_local_path,
        ),
        exception_handlers=ERROR_HANDLERS,
    )
    shapes = {"/v1/messages": messages_error, "/api": ollama_error}
    shaped = ErrorShapes(app, shapes, shared={"/v1/models": messages_error})
    return Application(RequestLog(UnversionedPaths(shaped)), batches)


class Application:
    """The app, and the batches that run beside its requests."""

    def __init__(self, app: ASGIApp, batches: Batches) -> None:
        self._app = app
        self._batches = batches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def resume_batches(self) -> None:
        """Those of an earlier server. If they cannot be read, requests are still answered."""
        try:
            self._batches.resume()
        except PippinError as error:
            log.warning("no batches are run: %s", error.message)

    async def close(self) -> None:
        await self._batches.close()


def create_waiting_app(config: ServerConfig, reason: str) -> ASGIApp:
    """While no model is loaded: the page, and a 503 for all other paths."""
    refusal = Mount("", app=error_response(NotReady(reason)))
    return RequestLog(Router([*(page_routes() if config.page else ()), refusal]))
