"""What serves one model: its engine, and what keeps that running. Knows no HTTP and no text.

`engine` refuses requests until `loaded` is done. Cancelling `run` stops the engine processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from pippin.config import Config
from pippin.engine.clients.engine_pool import EnginePool
from pippin.engine.clients.replica import Replica
from pippin.engine.engine_client import EngineClient
from pippin.errors import EngineDead
from pippin.messages import Ready
from pippin.startup.replica_plans import plan_replicas
from pippin.supervision.supervisor import Supervisor

logger = logging.getLogger(__name__)


class SupervisedEngine:
    def __init__(self, config: Config, on_loading: Callable[[str], None]) -> None:
        """`config` is resolved; `on_loading` is called with each stage of the first load.

        Raises ConfigError for options that replicas cannot have.
        """
        plans = plan_replicas(config)
        self.engine: EngineClient | EnginePool
        clients: list[EngineClient]
        if len(plans) == 1:
            self.engine = EngineClient()
            clients = [self.engine]
        else:
            self.engine = EnginePool(len(plans))
            clients = [*self.engine.replicas]
        self._supervisors = [
            Supervisor(
                plan.config,
                client,
                on_loading,
                environment=plan.environment,
                replica=number if len(plans) > 1 else None,
            )
            for number, (plan, client) in enumerate(zip(plans, clients, strict=True))
        ]
        self.loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Until it is cancelled, or the engine was drained and has exited.

        Raises LoadError if the model cannot be loaded, EngineDead after too many restarts.
        """
        if isinstance(self.engine, EnginePool):
            works = [*map(self._keep, self.engine.replicas, self._supervisors)]
        else:
            works = [self._supervisors[0].run()]
        running = [asyncio.create_task(work) for work in works]
        loading = asyncio.create_task(self._load())
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in (loading, *running):
                task.cancel()  # once: each stops its process then
            await asyncio.gather(loading, *running, return_exceptions=True)

    async def _load(self) -> None:
        ready = [await supervisor.loaded for supervisor in self._supervisors]
        num_slots = sum(each.num_slots for each in ready)
        if not self.loaded.done():
            self.loaded.set_result(msgspec.structs.replace(ready[0], num_slots=num_slots))

    async def _keep(self, replica: Replica, supervisor: Supervisor) -> None:
        """One that failed too often waits until it is wanted again, while another one serves."""
        assert isinstance(self.engine, EnginePool)
        while True:
            try:
                return await supervisor.run()
            except EngineDead as error:
                replica.give_up(error.message)
                if not any(each.is_wanted.is_set() for each in self.engine.replicas):
                    raise
                logger.error("%s; this replica stays down, and others serve", error.message)
            await replica.is_wanted.wait()
            supervisor.forgive()
