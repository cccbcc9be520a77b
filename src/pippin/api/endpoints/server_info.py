"""The endpoints about the server: its models, health, status and cache."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pippin.api.dialects.dialect import data_event
from pippin.api.endpoints.app_state import AppState
from pippin.api.http.access_control import shows_prompts
from pippin.api.http.answers import JSONResponse, error_body
from pippin.api.http.sending import StreamResponse
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import shown
from pippin.config import event_address
from pippin.engine.engine_pool import EnginePool
from pippin.errors import NotFound, NotReady, PippinError, RequestError
from pippin.types import GRID

ANTHROPIC_HEADER = "anthropic-version"  # all of its clients send it


async def list_models(state: AppState, request: Request) -> Response:
    listed = [(name, model.info) for model in state.models for name in model.info.names]
    if ANTHROPIC_HEADER in request.headers:
        models = [_anthropic_model(name, info) for name, info in listed]
        page = {"has_more": False, "first_id": listed[0][0], "last_id": listed[-1][0]}
        return JSONResponse({"data": models, **page})
    data = [_openai_model(name, info) for name, info in listed]
    return JSONResponse({"object": "list", "data": data})


async def show_model(state: AppState, request: Request) -> Response:
    id = request.path_params["id"]
    describe = _anthropic_model if ANTHROPIC_HEADER in request.headers else _openai_model
    return JSONResponse(describe(id, state.models.get(id).info))


async def model_info(state: AppState, request: Request) -> Response:
    """Names, not paths: clients have no use for the server's paths."""
    model = state.model_of(request).info
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


async def server_info(state: AppState, request: Request) -> Response:
    """What SGLang's routers read when they add this server."""
    model, config, kv_events = state.model_of(request).info, state.config, None
    if config.kv_events is not None:
        host, port = event_address("kv_events", config.kv_events)
        kv_events = {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": port,
            "topic": "kv-events",
            "block_size": GRID,
            "dp_size": config.num_replicas,
        }
    return JSONResponse(
        {
            "model_path": model.name,
            "served_model_name": model.name,
            "tp_size": 1,
            "dp_size": config.num_replicas,
            "disaggregation_mode": "null",  # a word of SGLang's
            "speculative_algorithm": None,  # blocks are hashed token by token
            "max_total_tokens": model.max_len,
            "kv_events": kv_events,
        }
    )


async def health(state: AppState, request: Request) -> Response:
    """Healthy: some model is served, or would be loaded for a request."""
    engines = [model.engine for model in state.models]
    lost = [engine for engine in engines if engine is not None and not engine.healthy]
    if lost and len(lost) == len(engines):
        raise NotReady(lost[0].reason or "the engine is not running")
    return JSONResponse({"status": "ok"})


async def ready(state: AppState, request: Request) -> Response:
    state.models.check_ready()
    return JSONResponse({"status": "ready"})


async def status(state: AppState, request: Request) -> Response:
    if state.models.default.info.on_demand and "model" not in request.query_params:
        states = {model.info.name: asdict(model.residency) for model in state.models}
        return JSONResponse({"models": states})
    found = await state.engine_of(request).status()
    if (cache := found.get("cache")) is None:
        return JSONResponse(found)
    if not state.keys.is_admin(request.scope):
        del cache["recent_paths"]
    elif not shows_prompts(state.config):
        for path in cache["recent_paths"]:
            del path["first_tokens"], path["last_tokens"]
    return JSONResponse(found)


async def flush_cache(state: AppState, request: Request) -> Response:
    return JSONResponse(await state.engine_of(request).flush_cache())


async def restart_replicas(state: AppState, request: Request) -> Response:
    """It may take as long as the longest reply: /status has the state of each replica."""
    state.engine_of(request).restart()
    return JSONResponse({"status": "restarting"}, status_code=202)


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


MAX_DIGITS = 4  # of a replica's number


async def events(state: AppState, request: Request) -> Response:
    return StreamResponse(
        _stream(state.engine_of(request), _replica_in(request)),
        encode_error=lambda error: b"event: error\n" + data_event(error_body(error)),
        timeout_s=None,
    )


async def node(state: AppState, request: Request) -> Response:
    if not shows_prompts(state.config):
        raise PippinError(
            "this server does not show prompts to clients (--show-prompts)", code="forbidden"
        )
    id = request.path_params["id"]
    found = await state.engine_of(request).node(id, _replica_in(request))
    if not found:
        raise NotFound(f"no node {id} in the tree, or no client reads /events")
    served = await state.model_of(request).served_text()
    return JSONResponse(
        {
            "id": id,
            "start": found["start"],
            "tokens": found["num_tokens"],
            "shown": len(found["tokens"]),
            "text": served.text.tokenizer.decode_with_special(found["tokens"]),
        }
    )


async def _stream(engine: EnginePool, replica: int) -> AsyncGenerator[bytes, None]:
    async with aclosing(engine.watch(replica)) as watched:
        async for name, json in watched:
            yield b"event: %b\ndata: %b\n\n" % (name.encode(), json)


def _replica_in(request: Request) -> int:
    """Which engine of several: each has a tree of its own."""
    given = request.query_params.get("replica", "0")
    if not (given.isascii() and given.isdecimal() and len(given) <= MAX_DIGITS):
        raise RequestError(f"replica is {shown(given)}: use a number, from 0 on", param="replica")
    return int(given)
