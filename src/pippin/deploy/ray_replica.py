"""A server without a socket, for one actor of Ray: requests arrive as values. Imports no Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from starlette.types import Message

from pippin.api.app import Application
from pippin.config import Config
from pippin.deploy.forwarding import ForwardedRequest, respond
from pippin.errors import EngineDead, LoadError
from pippin.startup.launch import Drainable, load_app
from pippin.startup.replicas import SupervisedEngine, with_remedy
from pippin.startup.resolve import resolve

log = logging.getLogger(__name__)


class RayReplica:
    def __init__(
        self, app: Application, engine: Drainable, supervising: asyncio.Task[None]
    ) -> None:
        self._app = app
        self._engine = engine
        self._supervising = supervising

    @classmethod
    async def start(cls, config: Config) -> RayReplica:
        """When the model is loaded. Raises LoadError if it cannot be."""
        config = await asyncio.to_thread(resolve, config)
        supervised = SupervisedEngine(config, on_loading=log.info)
        supervising = asyncio.create_task(supervised.run())
        loading = asyncio.create_task(load_app(config, supervised))
        await asyncio.wait((supervising, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            try:
                supervising.result()
            except LoadError as error:
                raise LoadError(with_remedy(error.message, config)) from error
        app = await loading
        app.resume_batches()
        return cls(app, supervised.engine, supervising)

    def respond(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        return respond(self._app, request)

    def check(self) -> None:
        """Raises if no engine will be started any more. One that is being replaced is no failure:
        loading a model again may take minutes, and requests wait or get a 503."""
        if self._supervising.done():
            reason = None if self._supervising.cancelled() else self._supervising.exception()
            raise EngineDead(str(reason or "the engine was stopped"))

    async def close(self) -> None:
        """Requests that still run end with an error."""
        await self._app.close()
        self._engine.close()
        self._supervising.cancel()
        await asyncio.wait((self._supervising,))
