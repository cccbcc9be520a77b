"""What a request waits for after load: kernels, captures and memory that something is the first to need."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torch_gpu.host import Asker, make_loop
from torch_gpu.plays import random_model

from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.graphs.capture import CudaGraphs
from pippin.types import SamplingParams

NUM_SLOTS = 64
MOST_EXTRA_MS = 50.0  # of the first request of a shape, beside what the next one of it takes
NUM_ROUNDS = 60
LONGEST = 12_000

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "long top_k": {"temperature": 1.0, "top_k": 500, "top_p": 0.9},
    "penalties": {"temperature": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "logit_bias": {"temperature": 1.0, "logit_bias": {5: 2.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 3},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 3},
    "embeds": {"temperature": 0.0},
}


@dataclass
class Firsts:
    """What was compiled or captured, with the seconds that a capture took."""

    compiled: list[str] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)


@contextmanager
def watched_firsts() -> Iterator[Firsts]:
    """Everything that Triton compiles or reads from its cache on disk, and that CUDA captures."""
    import triton

    found = Firsts()
    record, hook = CudaGraphs.record, triton.knobs.runtime.jit_post_compile_hook

    def note(*_: Any, **named: Any) -> None:
        found.compiled.append(
            str(named["fn"].name).rpartition(".")[2] + " " + str(named["repr"])[:300]
        )

    def timed(self: CudaGraphs, run: Any) -> Any:
        began = time.perf_counter()
        recorded = record(self, run)
        found.captured.append(time.perf_counter() - began)
        return recorded

    CudaGraphs.record, triton.knobs.runtime.jit_post_compile_hook = timed, note  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CudaGraphs.record, triton.knobs.runtime.jit_post_compile_hook = record, hook  # type: ignore[method-assign]


def loaded_loop(
    backend: TorchBackend,
    memory: str = "24GB",
    host_cache: str | None = None,
    speculate: str = "off",
) -> Any:
    """As an engine is when `/health` says ready."""
    loop = make_loop(backend, memory, host_cache, NUM_SLOTS, speculate)
    loop.warm_up.run_at_load(lambda _: None)
    gc.collect()
    gc.freeze()
    return loop


def propose_at_random(speculation: Any, vocab_size: int) -> None:
    """Drafts of every depth, nearly all of which are wrong: what a step launches does not depend on that."""
    rng, depth = np.random.default_rng(0), speculation.max_depth
    speculation.policy = None  # which would soon have no drafts
    speculation.choose_depth = lambda _: int(rng.integers(depth + 1))
    speculation.drafter.propose = lambda request, num_tokens: (
        rng.integers(0, vocab_size, num_tokens).astype(np.int32),
        0,
    )


def tails() -> None:
    """Requests of all shapes after load, without drafts and with some: nothing is compiled or captured for them.
    Without, the first of a shape takes at most 50 ms longer than the next one."""
    rounds = run_rounds("off")
    assert rounds.worst <= MOST_EXTRA_MS, (
        f"the first request of a shape took {rounds.worst:.0f} ms longer than the next one"
    )
    run_rounds("suffix")


def run_rounds(speculate: str) -> Rounds:
    from pippin.engine.build_loop import MAX_DEPTH

    began = time.perf_counter()
    depth = 0 if speculate == "off" else MAX_DEPTH
    with watched_firsts() as firsts:
        backend = TorchBackend(
            random_model(), num_slots=NUM_SLOTS, pool_bytes=None, max_depth=depth
        )
        loop = loaded_loop(backend, speculate=speculate)
    captured = sorted(firsts.captured)
    print(
        f"--speculate {speculate}: ready after {time.perf_counter() - began:.1f} s: {len(firsts.compiled)} kernels, {len(captured)} captures",
        flush=True,
    )
    if captured:
        print(
            f"a capture takes {statistics.median(captured) * 1e3:.1f} ms, the longest {captured[-1] * 1e3:.1f}, all {sum(captured):.1f} s",
            flush=True,
        )
    rounds = Rounds(loop)
    if depth:
        propose_at_random(loop.scheduler.speculation, loop.scheduler.spec.vocab_size)
        rounds.max_tokens = 24
    try:
        with watched_firsts() as firsts:
            for number in range(NUM_ROUNDS):
                rounds.run(number)
        drafted = loop.scheduler.metrics.drafted_tokens
        print(
            f"{NUM_ROUNDS} rounds, {drafted:,} drafts: {len(firsts.compiled)} kernels compiled, {len(firsts.captured)} captures",
            flush=True,
        )
        for name in firsts.compiled[:20]:
            print("  ", name[:200])
        for line in rounds.slow[:30]:
            print("  ", line)
    finally:
        loop.close()
    assert bool(drafted) == bool(depth), f"--speculate {speculate}: {drafted} drafts"
    assert not firsts.compiled, "a kernel was compiled, or read from disk, while requests ran"
    assert not firsts.captured, "a graph was captured while requests ran"
    return rounds


class Rounds:
    """Some requests at once, of one kind and of lengths that were not there before; then the same again, of other tokens."""

    def __init__(self, loop: Any) -> None:
        self.loop, self.asker = loop, Asker(loop)
        self.random = random.Random(0)
        self.rng = np.random.default_rng(0)
        self.max_tokens = 6
        self.worst = 0.0
        self.slow: list[str] = []

    def run(self, number: int) -> None:
        kind = list(KINDS)[number % len(KINDS)]
        lengths = [
            int(10 ** self.random.uniform(0.0, np.log10(LONGEST)))
            for _ in range(self.random.choice((1, 1, 2, 3, 7, 20)))
        ]
        if kind == "prompt_logprobs":
            lengths = [min(length, 3000) for length in lengths[:3]]
        first, again = (self.longest_step(kind, lengths) for _ in range(2))
        whole = self.longest_step(kind, lengths, self.last)  # restored whole
        for what, extra in (("first", first - again), ("restored", whole - again)):
            self.worst = max(self.worst, extra)
            if extra > 10.0:
                self.slow.append(
                    f"{kind}, {len(lengths)} prompts of {max(lengths)} and less, {what}: {first:.1f}, then {again:.1f}, restored {whole:.1f} ms"
                )

    def longest_step(
        self, kind: str, lengths: Sequence[int], prompts: list[list[int]] | None = None
    ) -> float:
        vocab = self.loop.scheduler.spec.vocab_size
        self.last = prompts or [self.rng.integers(10, vocab, length).tolist() for length in lengths]
        params = SamplingParams(**KINDS[kind], max_tokens=1 if kind == "embeds" else self.max_tokens)
        answers = [
            self.asker.submit(prompt, params=params, embeds=kind == "embeds")
            for prompt in self.last
        ]
        longest = 0.0
        while not all(answer.ended for answer in answers):
            began = time.perf_counter()
            self.asker.step()
            longest = max(longest, time.perf_counter() - began)
        while not self.loop.idle:
            self.asker.step()
        return longest * 1e3
