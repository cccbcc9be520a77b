"""A pool of one engine, with its replica's calls beside its own."""

from __future__ import annotations

from pippin.engine.engine_pool import EnginePool


class OneEngine(EnginePool):
    def __init__(self) -> None:
        super().__init__()
        [self.replica] = self.replicas
        self.engine_ready = self.replica.engine_ready
        self.engine_lost = self.replica.engine_lost
        self.deliver = self.replica.deliver
