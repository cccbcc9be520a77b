"""A simulated world whose engine asks another one for prompts, over a wire that loses things.

The engine of the world is the decode engine. The prefill engine has a machine of its own, as cruel
as the first; it dies and comes back, and so does the connection.
"""

from __future__ import annotations

import random
from dataclasses import replace

from builders import Client, check_idle
from peers import Wire, add_peer_tier, add_pushes
from pippin.scheduler import loads
from pippin.scheduler.loop import MAX_FAILED_STEPS, Loop
from simulator import FAULTS, NO_DRAFTS, Setting, SimulatedBackend, World


class PeerWorld(World):
    def __post_init__(self) -> None:
        self.chance = random.Random(f"peers {self.seed}")
        self.loss = self.chance.choice((0.0, 0.0, 0.05, 0.3))
        self.death_rate = self.chance.choice((0.0, 0.01, 0.05))
        self.wires: list[Wire] = []
        self.prefills: list[Client] = []
        self.least_wanted = loads.MIN_WANTED_TOKENS
        super().__post_init__()

    def run(self) -> None:
        loads.MIN_WANTED_TOKENS = 64  # most prompts of these worlds are short
        try:
            super().run()
        finally:
            loads.MIN_WANTED_TOKENS = self.least_wanted

    @property
    def wire(self) -> Wire:
        return self.wires[-1]

    def _make_loop(self, backend: SimulatedBackend) -> Loop:
        loop = super()._make_loop(backend)
        if loop.scheduler.cache is None:
            return loop
        self.wires.append(Wire(self.chance, self.loss))
        add_peer_tier(loop.scheduler, self.wire, self.chance.choice((1 << 17, 1 << 20)))
        loop.scheduler.traffic.clock = lambda: backend.now
        loop.scheduler.traffic.wait = lambda seconds: self._wait(backend, seconds)
        self._start_prefill(backend)
        return loop

    def _start_prefill(self, decode: SimulatedBackend) -> None:
        mine = self.setting
        drawn = Setting.draw(self.chance)
        setting = replace(
            drawn,
            components=mine.components,
            state_tokens=mine.state_tokens,
            knows_head=mine.knows_head,
            deterministic=mine.deterministic,
            capacity_bytes=max(drawn.capacity_bytes, decode.row_bytes(800)),
            cached=True,
            canary=False,
        )
        self.prefill_setting = setting
        backend = SimulatedBackend(self.chance, setting, NO_DRAFTS)
        maker = World.__new__(World)
        maker.__dict__ |= {"setting": setting, "drafting": NO_DRAFTS, "disk": None, "host": None}
        maker.__dict__ |= {"seed": self.chance.random(), "steps_run": 0, "rng": self.chance}
        maker.__dict__ |= {"workers": self.wire.workers, "by_id": {}}
        loop = World._make_loop(maker, backend)
        add_pushes(loop.scheduler)
        loop.scheduler.traffic.clock = lambda: decode.now
        loop.scheduler.traffic.wait = lambda seconds: False
        self.wire.prefill = Client(loop)
        self.prefills.append(self.wire.prefill)
        self._num_prefill_faults = 0

    def _wait(self, backend: SimulatedBackend, seconds: float) -> bool:
        super()._wait(backend, seconds)
        if self.wires:
            self._run_prefill()
        return True

    def _step(self) -> None:
        if self.wires:
            self._run_prefill()
        super()._step()

    def _run_prefill(self) -> None:
        chance, wire = self.chance, self.wire
        wire.workers.advance(chance.randrange(4))
        wire.deliver(chance.randrange(4))
        if chance.random() < self.death_rate:
            wire.disconnect()
            if chance.random() < 0.5:
                self._start_prefill(self.backend)
        elif not wire.connected and chance.random() < 0.2:
            wire.connected = True
        prefill = wire.prefill
        assert prefill is not None
        backend, rate = prefill.loop.backend, self.prefill_setting.fault_rate
        assert isinstance(backend, SimulatedBackend)
        if chance.random() < rate and self._num_prefill_faults < MAX_FAILED_STEPS - 1:
            backend.next_fault = chance.choice(FAULTS)
            self._num_prefill_faults += 1
        else:
            self._num_prefill_faults = 0
        if not prefill.loop.idle:
            prefill.step()
            self._check_prefill(prefill)

    def _check_prefill(self, prefill: Client) -> None:
        scheduler = prefill.loop.scheduler
        assert scheduler.cache is not None
        total = scheduler.budget.claimed + scheduler.cache.nbytes
        assert prefill.loop.failure or total <= self.prefill_setting.capacity_bytes

    def _check_end(self) -> None:
        super()._check_end()
        if not self.wires or self.client.loop.failure is not None:
            return
        wire, prefill = self.wire, self.wire.prefill
        assert prefill is not None
        for _ in range(20_000):
            wire.deliver()
            wire.workers.advance(99)
            if prefill.loop.idle:
                break
            prefill.step()
        if prefill.loop.failure is None:
            check_idle(prefill)
            assert not prefill.loop.scheduler.traffic.busy
        scheduler = self.client.loop.scheduler
        for _ in range(50):  # what was loaded is forgotten, a little in each plan
            scheduler.plan()
            wire.deliver()
            wire.workers.advance(99)
        assert wire.store is not None
        kept = wire.store.entries()
        assert not kept, f"{len(kept)} entries are kept after the last request"


def simulate_peers(seed: int, num_steps: int) -> int:
    """Run one world; returns how many steps it took. Raises AssertionError naming the seed."""
    world = PeerWorld(seed, num_steps)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(
            f"peers, seed {seed}, step {world.steps_run}: {error!r}\n{world.setting}\n"
            f"replay: python tools/simulate.py --peers --seed {seed} --length {num_steps}"
        ) from error
    return world.steps_run
