"""Questions to an engine that have no answer yet. Knows no request and no process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from pippin.errors import EngineDead, PippinError
from pippin.messages import Question


class Questions:
    def __init__(self, send: Callable[[Question], None]) -> None:
        self._send = send
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._ids = (f"call-{n}" for n in itertools.count())

    async def ask(self, question: Callable[[str], Question]) -> dict[str, Any]:
        """The answer to the question that `question` makes of an id."""
        id = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[id] = future
        self._send(question(id))
        try:
            return await future
        finally:
            del self._answers[id]

    def answered(self, id: str, data: dict[str, Any], error: str | None) -> None:
        future = self._answers.get(id)
        if future is None or future.done():  # the client has disconnected
            return
        if error is None:
            future.set_result(data)
        else:
            future.set_exception(PippinError(error))

    def end(self, reason: str) -> None:
        """There will be no answers."""
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineDead(reason))
