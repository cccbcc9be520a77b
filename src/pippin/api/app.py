"""Puts the HTTP server together. Knows no scheduler, no arrays and no field of any request."""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.batches.batch_metrics import BatchMetrics
from pippin.api.batches.batches import Batches
from pippin.api.dialects.messages.message_reply import messages_error
from pippin.api.dialects.ollama.ollama_reply import ollama_error
from pippin.api.dialects.responses.response_store import ResponseStores
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.batches.assemble import create_batches
from pippin.api.endpoints.batches.batch_routes import BatchRoutes
from pippin.api.endpoints.batches.file_routes import FileRoutes
from pippin.api.endpoints.events import EventsEndpoint
from pippin.api.endpoints.generation import Generation
from pippin.api.endpoints.local_pages import is_local_path
from pippin.api.endpoints.metrics_endpoint import MetricsEndpoint
from pippin.api.endpoints.model_metrics import ModelMetrics
from pippin.api.endpoints.ollama.ollama_downloads import OllamaDownloads
from pippin.api.endpoints.ollama.ollama_models import OllamaModels
from pippin.api.endpoints.ollama.ollama_replies import OllamaReplies
from pippin.api.endpoints.server_info import ServerInfo
from pippin.api.http.access_control import access_checks
from pippin.api.http.http_errors import ERROR_HANDLERS, ErrorShapes, error_response
from pippin.api.http.keys import known_keys
from pippin.api.http.request_log import RequestLog
from pippin.api.http.unversioned_paths import UnversionedPaths
from pippin.api.metered_engine import MeteredEngine
from pippin.api.page.routes import page_paths, page_routes
from pippin.api.served_models import ServedModels
from pippin.config import LimitsConfig, ServerConfig
from pippin.errors import NotReady, PippinError

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
