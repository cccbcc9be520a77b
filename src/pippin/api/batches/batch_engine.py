"""The engine as lines of batches use it: behind all other requests, and few at a time.

Knows no line. A request for n choices is n sequences here: each needs a place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from pippin.api.fields.shared import MAX_PRIORITY
from pippin.api.wrapped_engine import WrappedEngine
from pippin.engine.engine_client import Engine
from pippin.messages import Submit, TokenDelta

LOWEST_PRIORITY = -MAX_PRIORITY - 1  # below what any client may ask for


class BatchEngine(WrappedEngine):
    def __init__(self, engine: Engine, places: asyncio.Semaphore) -> None:
        super().__init__(engine)
        self._places = places  # of all lines

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        async with self._places:
            last = msgspec.structs.replace(submit, priority=LOWEST_PRIORITY)
            async with aclosing(self._engine.generate(last)) as deltas:
                async for delta in deltas:
                    yield delta
