"""An engine behind another one's verbs, to change one of them. Changes nothing itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from pippin.engine.clients.watchers import WatchEvent
from pippin.engine.engine_client import Engine
from pippin.messages import Submit, TokenDelta


class WrappedEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def healthy(self) -> bool:
        return self._engine.healthy

    @property
    def reason(self) -> str | None:
        return self._engine.reason

    def check_ready(self) -> None:
        self._engine.check_ready()

    def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        return self._engine.generate(submit)

    def abort(self, id: str) -> None:
        self._engine.abort(id)

    def finish(self, id: str) -> None:
        self._engine.finish(id)

    async def status(self) -> dict[str, Any]:
        return await self._engine.status()

    async def counters(self) -> dict[str, Any]:
        return await self._engine.counters()

    async def flush_cache(self) -> dict[str, Any]:
        return await self._engine.flush_cache()

    def watch(self, replica: int = 0) -> AsyncGenerator[WatchEvent, None]:
        return self._engine.watch(replica)

    async def node(self, node: int, replica: int = 0) -> dict[str, Any]:
        return await self._engine.node(node, replica)

    def restart(self) -> None:
        self._engine.restart()
