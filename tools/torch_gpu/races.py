"""Does it race? Random schedules, launched ahead of a GPU that is held up, and with waits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_gpu.plays import DRAWN, GREEDY, PENALISED, Play, random_model, tiny_model

from make_random_hybrid import TINY
from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.types import SamplingParams

NUM_SCHEDULES = 200
NUM_REPEATS = 5  # of a schedule that differs


def random_plans(rng: random.Random, num_steps: int) -> list[StepPlan]:
    """Four slots whose requests come, run in chunks, decode, keep states and go, in any order."""
    prompts: dict[int, np.ndarray] = {}
    lengths: dict[int, int] = {}
    plans = []
    for number in range(num_steps):
        retire, admit, prefill, decode = [], [], [], []
        for slot in range(1, 5):
            if slot in prompts and lengths[slot] > len(prompts[slot]) + 2 and rng.random() < 0.3:
                captures = rng.random() < 0.5
                retire.append(Retire(slot, 0, lengths[slot] if captures else 0, captures))
                del prompts[slot]
            if slot not in prompts:
                if rng.random() < 0.5:
                    continue
                prompts[slot] = np.array([rng.randrange(10, 8000) for _ in range(rng.randrange(1, 200))], dtype=np.int32)
                lengths[slot] = 0
                params = rng.choice([GREEDY, GREEDY, DRAWN, PENALISED])
                admit.append(Admit(slot, params, (), prompts[slot], seed=number))
            start, prompt = lengths[slot], prompts[slot]
            if start < len(prompt):
                end = min(len(prompt), start + rng.choice([64, 128]))
                prefill.append(PrefillRow(slot, start, prompt[start:end], samples=end == len(prompt), captures=True, checkpoints=(end,)))
                lengths[slot] = end
            elif rng.random() < 0.9:
                decode.append(DecodeRow(slot, start, checkpoint=rng.random() < 0.2))
                lengths[slot] += 1
        plans.append(StepPlan(number, tuple(retire), tuple(admit), tuple(prefill), tuple(decode)))
    slots = tuple(Retire(slot) for slot in prompts)
    return [*plans, StepPlan(num_steps, slots)]


@dataclass
class Ran:
    """A step: what it said, and checksums of what it captured."""

    tokens: dict[int, int]
    sums: list[tuple[str, torch.Tensor]]

    @property
    def bits(self) -> list[tuple[str, int]]:
        return [(name, int(value)) for name, value in self.sums]


def run_plans(backend: TorchBackend, plans: list[StepPlan], *, ahead: int) -> list[Ran]:
    """With so many steps in flight behind a kernel that only spins; 0: a wait after each."""
    results, pending = [], []

    def commit() -> None:
        result = pending.pop(0).wait()
        with backend._streams.forward():  # behind what is in flight: nobody waits for it here
            sums = [pair for capture in result.captures for pair in checksums(backend, capture)]
        for capture in result.captures:
            capture.release()
        results.append(Ran(dict(result.tokens), sums))

    for plan in plans:
        if ahead:
            with backend._streams.forward():
                torch.cuda._sleep(1_000_000)
        pending.append(backend.launch(plan))
        if not ahead:
            torch.cuda.synchronize()
        while len(pending) > ahead:
            commit()
    while pending:
        commit()
    torch.cuda.synchronize()  # for the checksums
    return results


def checksums(backend: TorchBackend, capture: Any) -> list[tuple[str, torch.Tensor]]:
    """Sums of bits, which do not depend on their order. Made on the device."""
    pools, found = backend.runner.pools, []
    for payload in capture.kv.values():
        bits = pools.cell_bytes(payload.kind, payload.cells).view(torch.int32)
        found.append((f"KV of slot {capture.slot}, [{capture.start}, {capture.end})", bits.sum()))
    for position, payload in capture.states.items():
        parts = [view[payload.slab].view(torch.int32).sum() for view in (*pools.recurrent, *pools.conv)]
        found.append((f"state of slot {capture.slot} at {position}", torch.stack(parts).sum()))
    return found


def same_said(a: list[Ran], b: list[Ran]) -> bool:
    return [ran.tokens for ran in a] == [ran.tokens for ran in b]


def same_bits(a: list[Ran], b: list[Ran]) -> bool:
    return [ran.bits for ran in a] == [ran.bits for ran in b]


def races() -> None:
    backend = TorchBackend(tiny_model("float32", TINY), num_slots=4, debug=True)
    others = []
    for seed in range(NUM_SCHEDULES):
        plans = random_plans(random.Random(seed), 12)
        expected = run_plans(backend, plans, ahead=0)
        found = run_plans(backend, plans, ahead=1 + seed % 3)
        if not same_said(found, expected):
            print_first_difference(plans, expected, found)
            repeat(backend, plans, ahead=1 + seed % 3)
            raise AssertionError(f"schedule {seed} says otherwise when it is launched ahead")
        if not same_bits(found, expected):
            others.append(seed)
        backend.runner.pools.arena.check_integrity()
        assert backend.runner.pools.arena.used_bytes == 0
        if seed % 50 == 49:
            print(f"{seed + 1} schedules say what they say with a wait after each step", flush=True)
    print(f"schedules that kept other bits, though they said the same: {others or 'none'}")
    if others:
        seed = others[0]
        repeat(backend, random_plans(random.Random(seed), 12), ahead=1 + seed % 3)
        raise AssertionError(f"{len(others)} schedules keep other bits when they are launched ahead")


def print_first_difference(plans: list[StepPlan], expected: list[Ran], found: list[Ran]) -> None:
    for plan, wanted, got in zip(plans, expected, found):
        bits = [name for (name, a), (_, b) in zip(wanted.bits, got.bits) if a != b]
        if bits or wanted.tokens != got.tokens:
            print(f"other bits in {bits}; {wanted.tokens} with waits, {got.tokens} here, of {plan}", flush=True)
            return


def repeat(backend: TorchBackend, plans: list[StepPlan], *, ahead: int) -> None:
    """Some times each way: a race with the host shows only ahead, one inside a kernel in both."""
    first = run_plans(backend, plans, ahead=0)
    for way in (0, ahead):
        runs = [run_plans(backend, plans, ahead=way) for _ in range(NUM_REPEATS)]
        said, bits = (sum(same(run, first) for run in runs) for same in (same_said, same_bits))
        print(f"{way} steps ahead: {said} of {NUM_REPEATS} say what another run with waits said, {bits} keep the same bits", flush=True)
        for run in runs:
            if not same_said(run, first):
                print_first_difference(plans, first, run)


def waits() -> None:
    """No launch waits for the device."""
    backend = TorchBackend(random_model(), num_slots=4)
    for params in (GREEDY, DRAWN, SamplingParams(temperature=1.0, frequency_penalty=0.5, logprobs=2)):
        play = Play(backend, 2, 130, params)
        play.decode(3)
        torch.cuda.set_sync_debug_mode("error")
        try:
            play.decode(4)
            play.end()
            again = Play(backend, 2, 130, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        again.end()
        print("nobody waited,", params.temperature)
