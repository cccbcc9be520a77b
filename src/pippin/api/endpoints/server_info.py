"""The endpoints about the server: its model, health, status, cache and OpenAPI document.

Knows no field of any request.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.openapi import openapi_document
from pippin.api.http.access_control import shows_prompts
from pippin.api.http.http_errors import JSONResponse, speaks_anthropic
from pippin.api.model_info import ModelInfo
from pippin.config.server import event_address
from pippin.errors import NotReady
from pippin.types import GRID


class ServerInfo:
    def __init__(self, state: AppState) -> None:
        self._state = state
        self._served = state.models

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
            Route("/restart_replicas", self._restart_replicas, methods=["POST"]),
            Route("/openapi.json", self._openapi),
        ]

    async def _models(self, request: Request) -> Response:
        listed = [(name, model.info) for model in self._served for name in model.info.names]
        if speaks_anthropic(request.scope):
            models = [_anthropic_model(name, info) for name, info in listed]
            page = {"has_more": False, "first_id": listed[0][0], "last_id": listed[-1][0]}
            return JSONResponse({"data": models, **page})
        data = [_openai_model(name, info) for name, info in listed]
        return JSONResponse({"object": "list", "data": data})

    async def _one_model(self, request: Request) -> Response:
        id = request.path_params["id"]
        describe = _anthropic_model if speaks_anthropic(request.scope) else _openai_model
        return JSONResponse(describe(id, self._served.get(id).info))

    async def _model_info(self, request: Request) -> Response:
        """Names, not paths: clients have no use for the server's paths."""
        model = self._state.model_of(request).info
        return JSONResponse(
            {
                "model_path": model.name,
                "tokenizer_path": model.name,
                "served_model_name": model.name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "max_model_len": model.max_len,
                "vocab_size": model.vocab_size,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def _server_info(self, request: Request) -> Response:
        """What SGLang's routers read when they add this server."""
        model = self._state.model_of(request).info
        return JSONResponse(
            {
                "model_path": model.name,
                "served_model_name": model.name,
                "tp_size": 1,
                "dp_size": self._state.config.num_replicas,
                "disaggregation_mode": "null",  # a word of SGLang's
                "speculative_algorithm": None,  # blocks are hashed token by token
                "max_total_tokens": model.max_len,
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
            "dp_size": self._state.config.num_replicas,
        }

    async def _health(self, request: Request) -> Response:
        """Healthy: some model is served, or would be loaded for a request."""
        engines = [model.engine for model in self._served]
        lost = [engine for engine in engines if engine is not None and not engine.healthy]
        if lost and len(lost) == len(engines):
            raise NotReady(lost[0].reason or "the engine is not running")
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        self._served.check_ready()
        return JSONResponse({"status": "ready"})

    async def _status(self, request: Request) -> Response:
        if self._served.default.info.on_demand and "model" not in request.query_params:
            states = {model.info.name: asdict(model.residency) for model in self._served}
            return JSONResponse({"models": states})
        status = await self._state.engine_of(request).status()
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
        return JSONResponse(await self._state.engine_of(request).flush_cache())

    async def _restart_replicas(self, request: Request) -> Response:
        """It may take as long as the longest reply: /status has the state of each replica."""
        self._state.admins.check(request.scope)
        self._state.engine_of(request).restart()
        return JSONResponse({"status": "restarting"}, status_code=202)

    async def _openapi(self, request: Request) -> Response:
        needs_key = bool(self._state.config.api_key)
        routes, rules = request.app.routes, self._state.rules
        return JSONResponse(openapi_document(routes, rules, needs_key=needs_key))


def _openai_model(name: str, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "pippin",
        "root": model.name,  # vLLM's: of an alias, the name of its model
        "max_model_len": model.max_len,
        "input_modalities": ["text"],
        **_unserved(model),
    }


def _unserved(model: ModelInfo) -> dict[str, Any]:
    kinds = model.checkpoint.unserved
    return {"unserved_modalities": list(kinds)} if kinds else {}


def _anthropic_model(name: str, model: ModelInfo) -> dict[str, Any]:
    created = datetime.fromtimestamp(model.created_s, UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_len,
        "max_tokens": model.max_len,
        **_unserved(model),
    }
