"""Drafts: the same tokens as without, by plain operations and by kernels ahead of the GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torch_gpu.plays import DRAWN, GREEDY, tiny_model

from pippin.backends.base import Admit, DecodeRow, PrefillRow, Proposal, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.step.words import StepSize
from pippin.types import SamplingParams

MAX_DEPTH = 4
NUM_SCHEDULES, NUM_TOKENS = 200, 48


@dataclass
class Reply:
    """A request in a slot whose tokens are known beforehand."""

    slot: int
    prompt: np.ndarray
    params: SamplingParams
    seed: int
    expected: list[int]
    tokens: list[int] = field(default_factory=list)
    bound: int = 0
    depths: list[int] = field(default_factory=list)

    def start(self) -> tuple[Admit, PrefillRow]:
        self.bound = len(self.prompt)
        self.depths.append(0)
        return Admit(self.slot, self.params, (), self.prompt, self.seed), PrefillRow(self.slot, 0, self.prompt, samples=True)

    def row(self, depth: int, is_wrong: Any, checkpoint: bool = False) -> DecodeRow:
        start = len(self.prompt) + len(self.tokens)
        last = self.bound + 1 + depth - len(self.prompt)
        drafts = [abs(t - 1) if is_wrong(n) else t for n, t in enumerate(self.expected[len(self.tokens) : last], len(self.tokens))]
        depth = min(depth, max(0, start + len(drafts) - self.bound - 1))
        proposal = Proposal(start, np.array(drafts, dtype=np.int32)) if depth else None
        row = DecodeRow(self.slot, self.bound, checkpoint=checkpoint, depth=depth, proposal=proposal)
        self.bound += 1 + depth
        self.depths.append(depth)
        return row

    def settle(self, found: tuple[int, ...]) -> None:
        self.tokens += found
        self.bound -= self.depths.pop(0) - (len(found) - 1)

    @property
    def parts_at(self) -> int | None:
        """Where it first says something else."""
        pairs = enumerate(zip(self.tokens, self.expected))
        return next((n for n, (a, b) in pairs if a != b), None)


def expected_replies(backend: TorchBackend, vocab: int) -> list[tuple[np.ndarray, SamplingParams, int, list[int]]]:
    found, rng = [], np.random.default_rng(1)
    for number, length in enumerate((3, 40, 64, 130, 200, 77)):
        prompt = rng.integers(10, vocab, length).astype(np.int32)
        params = (GREEDY, DRAWN, SamplingParams(temperature=1.0))[number % 3]
        reply = Reply(1, prompt, params, number, [])
        admit, chunk = reply.start()
        reply.settle(backend.launch(StepPlan(0, admit=(admit,), prefill=(chunk,))).wait().tokens[1])
        for _ in range(NUM_TOKENS):
            reply.settle(backend.launch(StepPlan(1, decode=(reply.row(0, None),))).wait().tokens[1])
        backend.launch(StepPlan(2, retire=(Retire(1),))).wait()
        found.append((prompt, params, number, reply.tokens))
    return found


def run_schedule(backend: TorchBackend, known: list[Any], seed: int, ahead: int) -> list[Reply]:
    rng = random.Random(seed)
    running: dict[int, Reply] = {}
    done, pending, step = [], [], 0

    def commit() -> None:
        launched, owners = pending.pop(0)
        result = launched.wait()
        for capture in result.captures:
            capture.release()
        for reply in owners:
            reply.settle(result.tokens[reply.slot])

    for step in range(24):
        retire, admit, prefill = [], [], []
        owners = []
        for slot in range(1, 5):
            if slot in running and running[slot].bound > len(running[slot].prompt) + NUM_TOKENS - 15:
                while pending:
                    commit()
                reply = running.pop(slot)
                done.append(reply)
                end = min(reply.bound, len(reply.prompt) + len(reply.tokens))
                retire.append(Retire(slot, 0, end, captures=True))
        rows = [r for r in running.values() if rng.random() < 0.85]
        wrong = set(rng.sample(range(NUM_TOKENS), rng.choice((0, 5, 30))))
        decode = [r.row(rng.choice((0, 0, 1, 2, 3, 4)), wrong.__contains__, rng.random() < 0.2) for r in rows]
        for slot in range(1, 5):
            if slot not in running and rng.random() < 0.5:
                reply = Reply(slot, *rng.choice(known))
                running[slot] = reply
                a, chunk = reply.start()
                admit.append(a)
                prefill.append(chunk)
                owners.append(reply)
        if ahead:
            with backend._streams.forward():
                torch.cuda._sleep(1_000_000)
        plan = StepPlan(step, tuple(retire), tuple(admit), tuple(prefill), tuple(decode))
        pending.append((backend.launch(plan), [*owners, *rows]))
        while len(pending) > ahead:
            commit()
    while pending:
        commit()
    backend.launch(StepPlan(step + 1, retire=tuple(Retire(slot) for slot in running))).wait()
    assert backend.runner.pools.arena.used_bytes == 0
    backend.runner.pools.arena.check_integrity()
    return [*done, *running.values()]


def drafts() -> None:
    """Schedules with drafts say what is said without, by plain operations and by kernels."""
    model = tiny_model("float32")
    known = expected_replies(TorchBackend(model, num_slots=4, debug=True), 8000)
    for kernels, num_schedules in ((False, 10), (True, NUM_SCHEDULES)):
        backend = TorchBackend(model, num_slots=4, max_depth=MAX_DEPTH, kernels=kernels, debug=True)
        num_tokens, others = 0, []
        for seed in range(num_schedules):
            replies = run_schedule(backend, known, seed, ahead=seed % 2)
            num_tokens += sum(len(reply.tokens) for reply in replies)
            others += [(seed, reply.slot, reply.parts_at) for reply in replies if reply.parts_at is not None]
        steps = backend.runner.forwards.steps
        print(f"kernels {kernels}: {num_schedules} schedules, {num_tokens:,} tokens; otherwise: {others[:8] or 'none'}", flush=True)
        if steps is not None:
            verified = StepSize(1, span=1)
            print(f"    {len(steps.graphs)} graphs captured, captures work: {steps.works(verified)}")
            assert steps.works(verified)
        assert len(others) <= num_schedules // 50, f"{len(others)} replies say otherwise"
