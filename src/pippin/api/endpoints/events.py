"""`GET /events`: what the engine does, as server-sent events; and the text of a node of the tree.

Passes on what the engine wrote, as it is. Knows no field of it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.dialects.dialect import data_event
from pippin.api.http.access_control import shows_prompts
from pippin.api.http.admins import Admins
from pippin.api.http.http_errors import Forbidden, JSONResponse, error_body
from pippin.api.http.sending import StreamResponse
from pippin.config import ServerConfig
from pippin.engine.engine_client import Engine
from pippin.errors import NotFound
from pippin.text.tokenizer import Tokenizer


class EventsEndpoint:
    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._shows_prompts = shows_prompts(config)
        self._admins = Admins(config)

    def routes(self) -> list[Route]:
        return [
            Route("/events", self.events),
            Route("/events/node/{id:int}", self.node),
        ]

    async def events(self, request: Request) -> Response:
        self._admins.check(request.scope)
        return StreamResponse(
            self._stream(),
            tell=lambda error: b"event: error\n" + data_event(error_body(error)),
            timeout_s=None,
        )

    async def node(self, request: Request) -> Response:
        """What a node of the tree stands for. Prompts are somebody's: see `shows_prompts`."""
        self._admins.check(request.scope)
        if not self._shows_prompts:
            raise Forbidden(
                "this server does not show prompts to whoever may use it (--show-prompts)"
            )
        id = request.path_params["id"]
        found = await self._engine.node(id)
        if not found:
            raise NotFound(f"no node {id} is in the tree, or nobody watches /events")
        return JSONResponse(
            {
                "id": id,
                "start": found["start"],
                "tokens": found["num_tokens"],
                "shown": len(found["tokens"]),
                "text": self._tokenizer.decode_with_special(found["tokens"]),
            }
        )

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._engine.watch()) as events:
            async for name, json in events:
                yield b"event: %b\ndata: %b\n\n" % (name.encode(), json)
