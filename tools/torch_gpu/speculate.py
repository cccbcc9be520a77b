"""Drafts: the same tokens as without, by kernels ahead of the GPU, and how much faster."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_gpu.plays import CONTEXT, DRAWN, GREEDY, Play, Requests, random_model

from make_random_hybrid import TINY, write_weights
from pippin.backends.base import Admit, DecodeRow, PrefillRow, Proposal, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import load
from pippin.backends.torch.step.words import StepSize
from pippin.types import SamplingParams

MAX_DEPTH = 4
NUM_SCHEDULES, NUM_TOKENS = 200, 48
SHARE = 0.8  # of drafts that are right


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
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), TINY, torch.float32)
        model = load(Path(folder), dtype="float32")
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


class DraftedPlay(Requests):
    """Prompts of one length, whose replies are known; two steps in flight. Rows of `special` have no drafts."""

    def __init__(self, backend: TorchBackend, num_rows: int, context: int, params: SamplingParams, expected: dict[int, list[int]], special: dict[int, SamplingParams] | None = None) -> None:
        super().__init__(backend, num_rows)
        rng = np.random.default_rng(0)
        vocab = backend.spec.vocab_size
        prompts = {s: rng.integers(10, vocab, context).astype(np.int32) for s in self.slots}
        self.special = special or {}
        self.replies = [Reply(s, prompts[s], self.special.get(s, params), s, expected[s]) for s in self.slots]
        for reply in self.replies:
            admit, chunk = reply.start()
            reply.settle(self.launch(admit=(admit,), prefill=(chunk,)).wait().tokens[reply.slot])

    def decode(self, num_steps: int, depth: int, share: float) -> tuple[list[float], int]:
        """Seconds between results, and tokens, where a share of the drafts is right."""
        def is_wrong(number: int) -> bool:
            return number * 7919 % 1000 >= 1000 * share

        times, waiting, num_tokens = [], None, 0
        for _ in range(num_steps):
            began = time.perf_counter()
            launched = self.launch(decode=tuple(reply.row(0 if reply.slot in self.special else depth, is_wrong) for reply in self.replies))
            if waiting is not None:
                num_tokens += self.settle(waiting)
            waiting = launched
            times.append(time.perf_counter() - began)
        return times, num_tokens + self.settle(waiting)

    def settle(self, step: Any) -> int:
        result = step.wait()
        for reply in self.replies:
            reply.settle(result.tokens[reply.slot])
        return sum(len(found) for found in result.tokens.values())


def speculate() -> None:
    """Tokens a second by depth, with 80% of right drafts, and with none, against no drafts.

    With random weights in bfloat16 many tokens are on a level, and a product of other shapes may
    choose another: so replies are recorded at the depth at which they are drafted.
    """
    backend = TorchBackend(random_model(), num_slots=32, pool_bytes=8 << 30, max_depth=MAX_DEPTH)
    table = []
    for num_rows in (1, 8, 32):
        play = Play(backend, num_rows, CONTEXT, GREEDY)
        play.decode(10)
        began = time.perf_counter()
        base = statistics.median(play.decode(60)[5:]) * 1e3
        base_rate = 60 / (time.perf_counter() - began)
        play.end()
        print(f"{num_rows} rows, no drafts: {base:.3f} ms a step", flush=True)
        for depth in range(1, MAX_DEPTH + 1):
            expected = {slot: [0] * 400 for slot in range(1, num_rows + 1)}  # wrong, all of them
            drafted = DraftedPlay(backend, num_rows, CONTEXT, GREEDY, expected)
            drafted.decode(10, depth, 1.0)
            began = time.perf_counter()
            drafted.decode(200, depth, 1.0)
            none_right = 200 / (time.perf_counter() - began) / base_rate
            drafted.end()
            known = {reply.slot: [*reply.tokens, *[0] * 200] for reply in drafted.replies}
            drafted = DraftedPlay(backend, num_rows, CONTEXT, GREEDY, known)
            drafted.decode(4, depth, SHARE)
            began = time.perf_counter()
            times, num_tokens = drafted.decode(40, depth, SHARE)
            rate = num_tokens / num_rows / (time.perf_counter() - began) / base_rate
            drafted.end()
            ms = statistics.median(times[5:]) * 1e3
            said = num_tokens / num_rows / 40
            table.append((num_rows, depth, rate))
            print(f"    depth {depth}: {ms:.3f} ms a step, {said:.2f} tokens a step of {sum(SHARE**n for n in range(depth + 1)):.2f}, {rate:.2f}x; none right {none_right:.2f}x", flush=True)
    for num_rows in (1, 8, 32):
        best, depth = max((rate, depth) for rows, depth, rate in table if rows == num_rows)
        print(f"{num_rows} rows: {best:.2f}x at depth {depth}")


def penalised() -> None:
    """ms a step of 17 rows with drafts, and of 16 beside one that has a penalty."""
    backend = TorchBackend(random_model(), num_slots=32, pool_bytes=8 << 30, max_depth=MAX_DEPTH)
    expected = {slot: [0] * 400 for slot in range(1, 18)}
    for turn in range(3):
        for name, special in (("17 drafting", {}), ("16 and one penalised", {17: SamplingParams(temperature=0.0, presence_penalty=0.5)})):
            for depth in (1, MAX_DEPTH):
                play = DraftedPlay(backend, 17, CONTEXT, GREEDY, expected, special)
                play.decode(10, depth, SHARE)
                times, _ = play.decode(100, depth, SHARE)
                play.end()
                print(f"{turn}: {name}, depth {depth}: {statistics.median(times[5:]) * 1e3:.3f} ms a step", flush=True)
