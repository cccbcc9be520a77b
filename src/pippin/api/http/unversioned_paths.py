"""Paths without /v1, as clients send them whose base URL lacks it. Knows no endpoint."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

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
