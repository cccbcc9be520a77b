"""Puts the HTTP server together."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.batches.routes import create_batches
from pippin.api.batches.store import ENDPOINTS
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.metrics_endpoint import MeteredEngine, ServerMetrics
from pippin.api.endpoints.server_info import ANTHROPIC_HEADER
from pippin.api.http.access_control import AccessControl, Keys
from pippin.api.http.answers import ERROR_HANDLERS, ErrorResponse, RequestLog
from pippin.api.page import page_paths, page_routes
from pippin.api.response_store import ResponseStores
from pippin.api.routes import (
    OPEN_PATHS,
    VERSIONED,
    error_shape_of,
    is_local_path,
    starlette_routes,
)
from pippin.api.served_models import ServedModels
from pippin.config import LimitsConfig, ServerConfig
from pippin.errors import NotReady, PippinError

log = logging.getLogger(__name__)


class Application:
    """The app, and the batches that run beside its requests."""

    def __init__(self, models: ServedModels, config: ServerConfig, limits: LimitsConfig) -> None:
        metrics = ServerMetrics(models)
        num_owners = max(1, len(Keys(config).owners))
        state = AppState(
            models,
            config,
            limits,
            ResponseStores(config.stored_responses, config.stored_bytes, num_owners),
            use=lambda name, engine: MeteredEngine(engine, metrics.times(name)),
        )
        state.metrics = metrics
        state.batches = self._batches = create_batches(
            state, lambda lines: starlette_routes(lines, ENDPOINTS)
        )
        app = Starlette(
            routes=[
                *starlette_routes(state),
                *(page_routes() if config.page else [Route("/", _greet)]),
            ],
            middleware=[
                Middleware(
                    AccessControl,
                    config=config,
                    public=OPEN_PATHS | (page_paths() if config.page else frozenset()),
                    is_local=is_local_path,
                )
            ],
            exception_handlers=ERROR_HANDLERS,
        )
        self._app = RequestLog(_with_shapes(app))

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


def _with_shapes(app: ASGIApp) -> ASGIApp:
    """An app that takes paths without /v1, and whose errors have the shape of their path, also
    those before a route is called."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"].removeprefix("/").partition("/")[0] in VERSIONED:
                scope = {**scope, "path": f"/v1{scope['path']}"}
            is_anthropic = ANTHROPIC_HEADER in Headers(scope=scope)
            scope["state"]["error_shape"], _ = error_shape_of(
                scope["path"], is_anthropic=is_anthropic
            )
        await app(scope, receive, send)

    return call


async def _greet(request: Request) -> Response:
    """Where Ollama greets."""
    return PlainTextResponse("Ollama is running")


def create_waiting_app(config: ServerConfig, reason: str) -> ASGIApp:
    """While no model is loaded: the page, and a 503 for all other paths."""
    refusal = Mount("", app=ErrorResponse(NotReady(reason)))
    return RequestLog(Router([*(page_routes() if config.page else ()), refusal]))
