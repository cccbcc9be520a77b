"""The thread in which connections of peers live. Knows no messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
CLOSE_SECONDS = 2.0
CLOSE_TURNS = 10  # of the event loop, in which sockets that were closed are released


class WireThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """From any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Callable[[], object]) -> None:
        """From any thread: `work` runs here soon. Nothing happens after `close`."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """Cancels what runs."""
        if self.is_running:
            self.start(_cancel_others()).result(CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(CLOSE_TURNS):
        await asyncio.sleep(0)
