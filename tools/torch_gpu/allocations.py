"""100,000 random allocations within `--memory`: what torch reserves, and what the driver counts.

    admit     a row takes its state and cells; some start behind a prefix that is kept
    grow      a decoded token takes a cell (counted by itself, not as one of the 100,000)
    capture   the tree takes one more hold of what a row computed, or of a state
    evict     a payload is released, or a part of it: cells become free in scattered places
    spill     a payload is copied to the host, and `load` makes a new one of those bytes

The model is narrow, so that its steps are cheap, and its cells and states are as wide as those of a
model of some size, so that its pools are full all the time. Steps are launched one ahead.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # in a process of its own
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from torch_gpu.limits import device_used
from torch_gpu.plays import DRAWN, GREEDY, PENALISED, make_model

from make_random_hybrid import QWEN3_5_0_8B
from pippin.backends.base import Admit, Capture, DecodeRow, Load, PrefillRow, Restore, Retire, Spill, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.warm_up import WarmUp
from pippin.types import Component, Payload, SamplingParams

DEVICE, HALF, KERNELS = "cuda", torch.bfloat16, True
BUDGET_BYTES, MOST_OVER = 3_000_000_000, 1.03
NUM_ROWS, NUM_ALLOCATIONS, MOST_SECONDS = 32, 100_000, 200.0
LONGEST_PROMPT, LONGEST_REPLY, MOST_AWAY = 700, 40, 64
LOOK_EVERY, DRIVER_SECONDS = 20, 10.0
NARROW = QWEN3_5_0_8B | {
    "text_config": QWEN3_5_0_8B["text_config"]
    | {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 8500, "intermediate_size": 256}
    | {"max_position_embeddings": 4096},
}
SERVED_SHAPE = NARROW
PARAMS = (GREEDY, DRAWN, PENALISED, SamplingParams(temperature=1.0, top_p=0.9, logprobs=5))


@dataclass(eq=False)
class Row:
    position: int
    end: int
    nbytes: int  # of its own
    borrowed: Prefix | None


@dataclass(eq=False)
class Prefix:
    """What restores the first tokens of a prompt, all of it or up to a state."""

    length: int
    payloads: dict[Component, tuple[Payload, ...]]
    num_rows: int = 0  # that read it

    @property
    def nbytes(self) -> int:
        return sum(payload.nbytes for parts in self.payloads.values() for payload in parts)


class Away(NamedTuple):
    """A payload's bytes, on the host."""

    component: Component
    num_tokens: int
    arrays: Sequence[Any]


class Launched(NamedTuple):
    step: Any
    plan: StepPlan
    nbytes: int  # of what it makes for the tree


class Allocations:
    """Rows that come and go at random, and what the tree keeps of them, within `capacity` bytes."""

    def __init__(self, backend: TorchBackend, capacity: int, seed: int = 0) -> None:
        self.backend, self.capacity = backend, capacity
        self.rng = np.random.default_rng(seed)
        self.free = list(range(NUM_ROWS, 0, -1))
        self.rows: dict[int, Row] = {}
        self.prefixes: list[Prefix] = []
        self.loose: list[Payload] = []  # kept, and restored by no row
        self.away: list[Away] = []
        self.kept_bytes = self.row_bytes = self.steps = self.most_rows = 0
        self.margin = 3 * backend.row_bytes(LONGEST_PROMPT + LONGEST_REPLY)
        self.counts: Counter[str] = Counter()
        self.launched: Launched | None = None

    @property
    def number(self) -> int:
        return sum(n for what, n in self.counts.items() if what != "grow")

    def held(self) -> int:
        return self.row_bytes + self.kept_bytes + (self.launched.nbytes if self.launched else 0)

    def step(self) -> None:
        retire = self._ended()
        decode = [
            DecodeRow(slot, row.position, checkpoint=bool(self.rng.random() < 0.05)) for slot, row in self.rows.items()
        ]
        spill, load = self._spills(), self._loads()
        admit: list[Admit] = []
        prefill: list[PrefillRow] = []
        for _ in range(int(self.rng.integers(6))):
            plan = self._plan(retire, admit, decode, prefill, spill, load)
            # What is captured is held by rows and tree until it is released: counted twice here.
            if not self.free or not self._make_room(self.backend.transient_bytes(plan) + self.margin):
                break
            self._admit(admit, prefill)
        plan = self._plan(retire, admit, decode, prefill, spill, load)
        nbytes = self.backend.transient_bytes(plan)
        self._make_room(nbytes)
        self.steps += 1
        launched = Launched(self.backend.launch(plan), plan, nbytes)
        self.loose += [payload for part in spill for payload in part.payloads]
        for row in decode:
            self.rows[row.slot].position += 1
        self.counts["grow"] += len(decode)
        self.counts["retire"] += len(retire)
        self.most_rows = max(self.most_rows, len(self.rows))
        before, self.launched = self.launched, launched
        if before is not None:
            self._commit(before)
        for _ in range(int(self.rng.integers(3))):
            self._evict()

    def end(self) -> None:
        if self.launched is not None:
            self._commit(self.launched)
            self.launched = None
        retire = [Retire(slot) for slot in self.rows]
        self.backend.launch(self._plan(retire, [], [], [], [], [])).wait()
        self.rows.clear()
        self.row_bytes = 0
        for prefix in self.prefixes:
            prefix.num_rows = 0
        while self.prefixes or self.loose:
            self._evict(whole=True)
        pools = self.backend.runner.pools
        pools.arena.check_integrity()
        assert pools.arena.used_bytes == 0, "something is still held"
        assert self.kept_bytes == 0, "not counted as it was released"

    # ---- a step's parts --------------------------------------------------------------------

    def _ended(self) -> list[Retire]:
        retire = []
        for slot, row in list(self.rows.items()):
            if row.position >= row.end or self.rng.random() < 0.02:
                start = row.borrowed.length if row.borrowed else 0
                retire.append(Retire(slot, start, row.position, captures=bool(self.rng.random() < 0.5)))
                if row.borrowed is not None:
                    row.borrowed.num_rows -= 1
                self.row_bytes -= self.rows.pop(slot).nbytes
                self.free.append(slot)
        return retire

    def _admit(self, admit: list[Admit], prefill: list[PrefillRow]) -> None:
        rng, slot = self.rng, self.free.pop(0)
        prefix = self.prefixes[int(rng.integers(len(self.prefixes)))] if self.prefixes and rng.random() < 0.5 else None
        start, restore = 0, None
        if prefix is not None:
            start, restore = prefix.length, Restore(prefix.length, prefix.payloads)
            prefix.num_rows += 1
            self.counts["restore"] += 1
        whole = prefix is not None and Component.HIDDEN in prefix.payloads and rng.random() < 0.5
        length = start if whole else start + int(rng.integers(1, max(2, LONGEST_PROMPT - start)))
        end = length + int(rng.integers(2, LONGEST_REPLY))
        prompt = rng.integers(10, self.backend.spec.vocab_size, length).astype(np.int32)
        admit.append(Admit(slot, PARAMS[int(rng.integers(len(PARAMS)))], (), prompt, seed=self.steps))
        marks = tuple(sorted({*range(start + 64, length, 256), length})) if length > start else ()
        captures = bool(rng.random() < 0.7) and length > start
        prefill.append(
            PrefillRow(slot, start, prompt[start:], samples=True, restore=restore, captures=captures, checkpoints=marks if captures else ())
        )
        nbytes = self.backend.row_bytes(end, start)
        self.rows[slot] = Row(length, end, nbytes, prefix)
        self.row_bytes += nbytes
        self.counts["admit"] += 1

    def _spills(self) -> list[Spill]:
        """Of a payload, which cannot be evicted before the step is launched."""
        if len(self.away) >= MOST_AWAY or not self.loose:
            return []
        payload = self.loose.pop(int(self.rng.integers(len(self.loose))))
        self.counts["spill"] += 1
        return [Spill(_component(payload), (payload,))]

    def _loads(self) -> list[Load]:
        if not self.away or self.rng.random() < 0.3:
            return []
        found = self.away.pop(0)
        self.counts["load"] += 1
        return [Load(found.component, found.num_tokens, tuple(found.arrays))]

    def _plan(self, retire: Any, admit: Any, decode: Any, prefill: Any, spill: Any, load: Any) -> StepPlan:
        parts = {"retire": retire, "admit": admit, "decode": decode, "prefill": prefill, "spill": spill, "load": load}
        return StepPlan(self.steps, **{name: tuple(part) for name, part in parts.items()})

    def _commit(self, launched: Launched) -> None:
        result = launched.step.wait()
        for capture in result.captures:
            self._keep(capture)
        for payload in result.loaded:
            self._keep_loose(payload)
        for spill, spilled in zip(launched.plan.spill, result.spilled, strict=True):
            num_tokens = sum(payload.num_tokens for payload in spill.payloads)
            self.away.append(Away(spill.component, num_tokens, spilled.arrays()))
            spilled.release()

    # ---- what is kept ----------------------------------------------------------------------

    def _keep(self, capture: Capture) -> None:
        """A prompt from its first token to a state is a prefix; the rest cannot be restored."""
        self.counts["capture"] += len(capture.payloads)
        states = dict(capture.states)
        if capture.kv and capture.start == 0 and capture.end in states:
            payloads: dict[Component, tuple[Payload, ...]] = {kind: (payload,) for kind, payload in capture.kv.items()}
            payloads[Component.STATE] = (states.pop(capture.end),)
            if capture.hidden is not None:
                payloads[Component.HIDDEN] = (capture.hidden,)
            prefix = Prefix(capture.end, payloads)
            self.prefixes.append(prefix)
            self.kept_bytes += prefix.nbytes
        else:
            for payload in (*capture.kv.values(), *([capture.hidden] if capture.hidden else [])):
                self._keep_loose(payload)
        for payload in states.values():
            self._keep_loose(payload)

    def _keep_loose(self, payload: Payload) -> None:
        self.loose.append(payload)
        self.kept_bytes += payload.nbytes

    def _evict(self, *, whole: bool = False) -> bool:
        unused = [prefix for prefix in self.prefixes if not prefix.num_rows]
        if unused and (not self.loose or self.rng.random() < 0.3):
            prefix = unused[int(self.rng.integers(len(unused)))]
            self.prefixes.remove(prefix)
            for parts in prefix.payloads.values():
                for payload in parts:
                    self._release(payload)
            return True
        if not self.loose:
            return False
        payload = self.loose.pop(int(self.rng.integers(len(self.loose))))
        if payload.num_tokens > 1 and not whole and self.rng.random() < 0.5:
            payload, rest = payload.split(int(self.rng.integers(1, payload.num_tokens)))
            self.loose.append(rest)
        self._release(payload)
        return True

    def _release(self, payload: Payload) -> None:
        self.kept_bytes -= payload.nbytes
        payload.release()
        self.counts["evict"] += 1

    def _make_room(self, nbytes: int) -> bool:
        while self.held() + nbytes > self.capacity:
            if not self._evict():
                return False  # rows read all that is left, or nearly
        return True


def _component(payload: Payload) -> Component:
    kind = getattr(payload, "kind", None)
    if kind is not None:
        return kind
    return Component.HIDDEN if hasattr(payload, "hidden") else Component.STATE


# ---- within a budget -------------------------------------------------------------------------


def allocate_within(budget_bytes: int, look: Callable[[], int], driver: Callable[[], int]) -> None:
    """`look`: at most how many bytes this process has had of the device; `driver`: what the driver
    itself counts now, which takes a while."""
    backend = TorchBackend(make_model(SERVED_SHAPE, HALF, DEVICE), num_slots=NUM_ROWS, pool_bytes=None, kernels=KERNELS)
    assert backend.has_kernels == KERNELS, "the kernels do not take this shape, or differ from plain operations"
    capacity = backend.limit_memory(budget_bytes)
    WarmUp(backend, lambda nbytes: nbytes <= capacity).run_at_load(lambda _: None)  # as an engine does
    print(f"{backend._memory}; for requests and the tree {capacity:,}", flush=True)
    work, began = Allocations(backend, capacity), time.perf_counter()
    by_torch, by_driver, next_look, fullest = look(), driver(), began + DRIVER_SECONDS, 0.0
    while work.number < NUM_ALLOCATIONS and time.perf_counter() - began < MOST_SECONDS:
        backend.make_way(busy=work.steps % 100 < 90)
        work.step()
        if work.steps % LOOK_EVERY == 0:
            by_torch = max(by_torch, look())
            fullest = max(fullest, backend.runner.pools.arena.used_bytes / capacity)
        if time.perf_counter() > next_look:
            by_driver, next_look = max(by_driver, driver()), time.perf_counter() + DRIVER_SECONDS
    by_torch, by_driver = max(by_torch, look()), max(by_driver, driver())
    work.end()
    seconds = time.perf_counter() - began
    print(f"{work.number:,} allocations in {work.steps:,} steps and {seconds:.1f} s: {dict(work.counts)}; {work.most_rows} rows at most, pools {fullest:.0%} full at most")
    for name, most in (("torch's peak and CUDA's own", by_torch), ("the driver", by_driver)):
        print(f"by {name}: at most {most:,} bytes of {budget_bytes:,}: {most / budget_bytes:.2%}", flush=True)
    assert max(by_torch, by_driver) <= budget_bytes * MOST_OVER, "more than the budget"
    assert work.number >= NUM_ALLOCATIONS, "too slow: fewer allocations than asked for"
    assert work.most_rows == NUM_ROWS, "the rows never all ran"
    assert fullest > 0.7, "the pools were never full"
    assert all(work.counts[what] for what in ("admit", "grow", "capture", "evict", "restore", "spill", "load")), work.counts
    backend.close()


def allocations() -> None:
    """In a process of its own, so that all that it holds is what the budget is for."""
    done = subprocess.run([sys.executable, __file__], timeout=MOST_SECONDS + 150, check=False)
    assert done.returncode == 0, "the budget was not kept: see above"


def main() -> None:
    before = device_used()  # before this process has a context
    torch.zeros(1, device=DEVICE)
    used, free = device_used() - before, torch.cuda.mem_get_info()[0]

    def look() -> int:
        """What torch reserved at most, beside what the driver counts and torch did not reserve."""
        now = used + free - torch.cuda.mem_get_info()[0]
        return torch.cuda.max_memory_reserved() + now - torch.cuda.memory_reserved()

    allocate_within(BUDGET_BYTES, look, lambda: device_used() - before)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
