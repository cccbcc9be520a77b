"""`GET /events`: what the engine does, as server-sent events; and the text of a tree's node."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from pippin.api.dialects.dialect import data_event
from pippin.api.endpoints.app_state import AppState
from pippin.api.http.access_control import shows_prompts
from pippin.api.http.http_errors import JSONResponse, error_body
from pippin.api.http.sending import StreamResponse
from pippin.api.requests.body import shown
from pippin.engine.engine_pool import EnginePool
from pippin.errors import NotFound, PippinError, RequestError

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
