"""The endpoints about the server: its model, health, status, cache and OpenAPI document.

Knows no field of any request.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.openapi import openapi_document
from pippin.api.http.access_control import shows_prompts
from pippin.api.http.http_errors import JSONResponse, speaks_anthropic
from pippin.config.server import event_address
from pippin.errors import NotReady
from pippin.types import GRID


class ServerInfo:
    def __init__(self, state: AppState) -> None:
        self._state = state
        self._engine, self._model = state.engine, state.model

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{id:path}", self._one_model),
            Route("/get_model_info", self._model_info),
            Route("/model_info", self._model_info),  # SGLang's newer name of it
            Route("/get_server_info", self._server_info),
            Route("/server_info", self._server_info),  # SGLang's newer name of it
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/status", self._status),
            Route("/flush_cache", self._flush_cache, methods=["POST"]),
            Route("/openapi.json", self._openapi),
        ]

    async def _models(self, request: Request) -> Response:
        names = self._model.names
        if speaks_anthropic(request.scope):
            models = [self._anthropic_model(name) for name in names]
            page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
            return JSONResponse({"data": models, **page})
        return JSONResponse({"object": "list", "data": [*map(self._describe_model, names)]})

    async def _one_model(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._model.check_name(id)
        anthropic = speaks_anthropic(request.scope)
        return JSONResponse((self._anthropic_model if anthropic else self._describe_model)(id))

    async def _model_info(self, request: Request) -> Response:
        """Names, not paths: clients have no use for the server's paths."""
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

    async def _server_info(self, request: Request) -> Response:
        """What SGLang's routers read when they add this server."""
        return JSONResponse(
            {
                "model_path": self._model.name,
                "served_model_name": self._model.name,
                "tp_size": 1,
                "dp_size": 1,
                "disaggregation_mode": "null",  # a word of SGLang's
                "speculative_algorithm": None,  # blocks are hashed token by token
                "max_total_tokens": self._model.max_len,
                "kv_events": self._kv_events(),
            }
        )

    def _kv_events(self) -> dict[str, Any] | None:
        address = self._state.config.kv_events
        if address is None:
            return None
        host, port = event_address("kv_events", address)
        return {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": port,
            "topic": "kv-events",
            "block_size": GRID,
            "dp_size": 1,
        }

    async def _health(self, request: Request) -> Response:
        if not self._engine.healthy:
            raise NotReady(self._engine.reason or "the engine is not running")
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        self._engine.check_ready()
        return JSONResponse({"status": "ready"})

    async def _status(self, request: Request) -> Response:
        status = await self._engine.status()
        if (cache := status.get("cache")) is None:
            return JSONResponse(status)
        if not self._state.admins.admit(request.scope):
            del cache["recent_paths"]
        elif not shows_prompts(self._state.config):
            for path in cache["recent_paths"]:
                del path["first_tokens"], path["last_tokens"]
        return JSONResponse(status)

    async def _flush_cache(self, request: Request) -> Response:
        self._state.admins.check(request.scope)
        return JSONResponse(await self._engine.flush_cache())

    async def _openapi(self, request: Request) -> Response:
        needs_key = bool(self._state.config.api_key)
        routes, rules = request.app.routes, self._state.rules
        return JSONResponse(openapi_document(routes, rules, needs_key=needs_key))

    def _describe_model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._model.created_s,
            "owned_by": "pippin",
            "max_model_len": self._model.max_len,
        }

    def _anthropic_model(self, name: str) -> dict[str, Any]:
        created = datetime.fromtimestamp(self._model.created_s, UTC)
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created.isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": self._model.max_len,
            "max_tokens": self._model.max_len,
        }
