"""What serves one model: its engine, and what keeps that running. Knows no HTTP and no text.

`engine` refuses requests until `loaded` is done. Cancelling `run` stops the engine process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pippin.config import Config
from pippin.engine.engine_client import EngineClient
from pippin.messages import Ready
from pippin.supervision.supervisor import Supervisor


class SupervisedEngine:
    def __init__(self, config: Config, on_loading: Callable[[str], None]) -> None:
        """`config` is resolved; `on_loading` is called with each stage of the first load."""
        self.engine = EngineClient()
        self._supervisor = Supervisor(config, self.engine, on_loading)
        self.loaded: asyncio.Future[Ready] = self._supervisor.loaded

    async def run(self) -> None:
        """Until it is cancelled, or the engine was drained and has exited.

        Raises LoadError if the model cannot be loaded, EngineDead after too many restarts.
        """
        await self._supervisor.run()
