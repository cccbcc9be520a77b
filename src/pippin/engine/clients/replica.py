"""One of several engines of a model: its load, its prefixes, its replacement. Knows no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pippin.engine.clients.prefix_index import PrefixIndex
from pippin.engine.clients.suspects import OpenRequest, Suspects
from pippin.engine.engine_client import EngineClient, Sender
from pippin.errors import EngineDead
from pippin.messages import Delivered, RestorablePrefixes, Shutdown

# What an open request weighs, in tokens of a prompt: it delays the steps of others, and its row
# takes memory from the cache. With less, one replica attracts most conversations, and evicts some.
ROW_TOKENS = 128


class Replica(EngineClient):
    def __init__(self, suspects: Suspects, on_change: Callable[[], None]) -> None:
        """`on_change`: its engine is ready, or lost."""
        super().__init__(suspects)
        self.prefixes = PrefixIndex()
        self.num_to_compute = 0  # tokens of prompts that have no reply yet
        self.is_resting = False  # requests are routed elsewhere, if there is another
        self.is_restarting = False  # requests wait for the next engine
        self._was_asked_to_exit = False
        self._on_change = on_change
        self._replaced = asyncio.Event()  # an engine is ready, or there will be none
        self.is_wanted = asyncio.Event()  # not set: its engine failed too often, and stays down
        self.is_wanted.set()

    @property
    def serves(self) -> bool:
        sender = self._sender
        return self.healthy and not self.is_restarting and sender is not None and sender.alive

    @property
    def load(self) -> int:
        """In tokens that prefill would compute in that time."""
        return self.num_to_compute + ROW_TOKENS * self.num_open

    @property
    def state(self) -> str:
        if self.is_restarting:
            return "restarting"
        if not self.healthy:
            return self.reason or "lost"
        return "draining" if self.is_resting else "serving"

    def forget(self, id: str) -> None:
        """Its reply has ended."""
        self._forget(id)

    def release_unsent(self) -> list[OpenRequest]:
        """Requests that no engine has, in order of arrival: they are another replica's now."""
        unsent = [request for request in self._requests.values() if not request.sent]
        for request in unsent:
            self._forget(request.submit.id)
        return unsent

    async def replace_engine(self) -> None:
        """Its requests end, then its engine exits and another is loaded.

        Raises EngineDead if engines failed to load until the supervisor gave up.
        """
        self.is_resting = True
        self.is_wanted.set()
        try:
            while self.num_open:
                await self.drained()
            self._replaced.clear()
            if self.healthy:
                self.is_restarting = self._was_asked_to_exit = True
                self._send(Shutdown())
            await self._replaced.wait()
        finally:
            self.is_resting = False
        if not self.is_wanted.is_set():
            raise EngineDead(self.reason or "")

    # ---- what a supervisor calls ---------------------------------------------------------------

    def engine_ready(self, sender: Sender) -> None:
        self.is_restarting = self._was_asked_to_exit = False
        super().engine_ready(sender)
        self._replaced.set()
        self._on_change()

    def exited_as_asked(self) -> bool:
        """Once: the engines that follow are to serve."""
        asked, self._was_asked_to_exit = self._was_asked_to_exit, False
        return asked

    def engine_lost(self, reason: str, *, knows_all: bool = False) -> None:
        self._replaced.clear()
        self.prefixes.clear()
        super().engine_lost(reason, knows_all=knows_all)
        self._on_change()

    def give_up(self, reason: str) -> None:
        """Its engine is not restarted until it is wanted."""
        self.is_wanted.clear()
        self.is_restarting = False
        self.reason = reason
        self._replaced.set()
        self._on_change()

    def deliver(self, message: Delivered) -> None:
        if isinstance(message, RestorablePrefixes):
            self.prefixes.change(message)
        else:
            super().deliver(message)

    def _submit(self, request: OpenRequest) -> None:
        if not self.is_restarting:
            super()._submit(request)
