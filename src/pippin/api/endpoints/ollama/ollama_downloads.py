"""Ollama's pull and delete: models of the Hugging Face hub's cache. Knows no hub's protocol.

The server goes on serving the model that it serves: what is pulled is for the next start.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.dialects.ollama.ollama_reply import HEARTBEAT, line, ollama_error
from pippin.api.endpoints.app_state import AppState
from pippin.api.fields.ollama import DELETE, LATEST, PULL
from pippin.api.fields.table import FieldTable
from pippin.api.http.access_control import check_downloads
from pippin.api.http.request_log import record_of
from pippin.api.http.sending import JSON_LINES, StreamResponse, WholeResponse
from pippin.api.requests.body import Body
from pippin.errors import LoadError, Overloaded, RequestError, cut
from pippin.hub.cached_models import delete_cached_model, find_cached_model
from pippin.hub.download import HUB_ID
from pippin.hub.pull_process import pull_progress

Progress = dict[str, Any]
SUCCESS: Progress = {"status": "success"}
HUB_PREFIX = re.compile(r"(https?://)?(hf\.co|huggingface\.co)/")  # as Ollama's users write it
REVISION = re.compile(r"\w[\w.-]{0,127}")


class OllamaDownloads:
    def __init__(self, state: AppState) -> None:
        self._state = state
        self._running: str | None = None  # one at a time: a disk and a network are shared

    def routes(self) -> list[Route]:
        return [
            Route("/api/pull", self._pull, methods=["POST"]),
            Route("/api/delete", self._delete, methods=["DELETE"]),
        ]

    async def _pull(self, request: Request) -> Response:
        name, body = await self._named(request, PULL)
        if not body.get("stream", True):
            return WholeResponse(lambda: self._last(name), None)
        return StreamResponse(
            self._lines(name),
            encode_error=lambda error: line(ollama_error(error)),
            timeout_s=None,
            media_type=JSON_LINES,
            heartbeat=lambda: HEARTBEAT,
        )

    async def _delete(self, request: Request) -> Response:
        name, _ = await self._named(request, DELETE)
        id, _ = _hub_id(name)
        if self._serves(name):
            raise RequestError(f"model {id!r} is served by this server: stop it first")
        await asyncio.to_thread(_delete, id)
        return Response()

    async def _named(self, request: Request, table: FieldTable) -> tuple[str, Body]:
        check_downloads(self._state.config, request.scope)

        def read(fields: Any) -> tuple[str, Body]:
            body = self._state.rules.body(fields)
            table.check(body, self._state.rules)
            field = "model" if body.has("model") else "name"  # the older name of it
            return body.required_string(field), body

        name, body = await self._state.read_json(request, read)
        record_of(request.scope).ignored = body.leniency.header()
        return name, body

    async def _lines(self, name: str) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._progress(name)) as progress:
            async for each in progress:
                yield line(each)

    async def _last(self, name: str) -> Progress:
        async with aclosing(self._progress(name)) as progress:
            async for _ in progress:
                pass
        return SUCCESS

    async def _progress(self, name: str) -> AsyncGenerator[Progress, None]:
        if self._serves(name):
            yield SUCCESS
            return
        id, revision = _hub_id(name)
        if self._running is not None:
            raise Overloaded(
                f"{self._running} is being downloaded, and one model is at a time: pull "
                f"{cut(name)} when that is done"
            )
        self._running = id
        try:
            async with aclosing(pull_progress(id, revision)) as progress:
                async for each in progress:
                    yield each
        finally:
            self._running = None

    def _serves(self, name: str) -> bool:
        """Clients pull a model that they do not find in `/api/tags`."""
        plain = name.removesuffix(LATEST)
        accepted = [model.info.accepted_names for model in self._state.models]
        if any(names is not None and plain in names for names in accepted):
            return True
        return None in accepted and not HUB_ID.fullmatch(plain)


def _hub_id(name: str) -> tuple[str, str | None]:
    """The id and the revision in `owner/name`, `hf.co/owner/name` and `owner/name:revision`."""
    id, _, tag = HUB_PREFIX.sub("", name, count=1).partition(":")
    revision = None if tag in ("", LATEST.removeprefix(":")) else tag
    is_revision = revision is None or REVISION.fullmatch(revision)
    if not HUB_ID.fullmatch(id) or not is_revision:
        raise RequestError(
            f"model is {cut(name)!r}; models are pulled from the Hugging Face hub: it must be an "
            "id such as Qwen/Qwen3.5-0.8B, with an optional :revision",
            param="model",
        )
    return id, revision


def _delete(id: str) -> None:
    try:
        delete_cached_model(find_cached_model(id))
    except LoadError as error:  # another server serves it
        raise RequestError(error.message) from error
