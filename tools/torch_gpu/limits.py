"""Where it could break: contexts of 128,000 tokens, a budget of 6 GB, captures that fail."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # `budget` runs in a process of its own
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from torch_gpu.plays import DRAWN, GREEDY, PENALISED, Play, Requests, make_model

from make_random_hybrid import QWEN3_5_0_8B, TINY
from pippin.backends.base import Admit, Capture, DecodeRow, PrefillRow, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.graphs.capture import CudaGraphs
from pippin.backends.torch.load import LoadedModel
from pippin.types import GRID, SamplingParams

DEVICE = "cuda"
HALF = torch.bfloat16
KERNELS = True
LONG, SHORT, NUM_SHORT, CHUNK = 128_000, 512, 31, 2048
BUDGET_BYTES, MOST_OVER = 6_000_000_000, 1.03
NUM_ROWS, NUM_OPERATIONS, BUDGET_SECONDS, SERVED_SHAPE = 32, 20_000, 60.0, QWEN3_5_0_8B
NEAR = 1e-2  # log probabilities in float32, after another order of sums
LEAK_BYTES = 1 << 20
SCORED = SamplingParams(temperature=0.0, logprobs=5)


def random_model(config: dict[str, Any], dtype: torch.dtype, max_len: int) -> LoadedModel:
    config = config | {"text_config": config["text_config"] | {"max_position_embeddings": max_len}}
    return make_model(config, dtype, DEVICE)


# ---- long contexts -----------------------------------------------------------------------------


class Mixed(Requests):
    """Rows of different lengths: prompts in chunks, then one token of each in every step."""

    def __init__(self, backend: TorchBackend, lengths: list[int], params: SamplingParams) -> None:
        super().__init__(backend, len(lengths))
        self.ends = dict(enumerate(lengths, start=1))
        rng = np.random.default_rng(0)
        for slot, length in self.ends.items():
            prompt = rng.integers(10, backend.spec.vocab_size, length).astype(np.int32)
            self.take(self.launch(admit=(Admit(slot, params, (), prompt, seed=slot),)))
            for start in range(0, length, CHUNK):
                row = PrefillRow(slot, start, prompt[start : start + CHUNK], samples=start + CHUNK >= length)
                self.take(self.launch(prefill=(row,)))

    def decode(self, num_steps: int) -> list[float]:
        times = []
        for _ in range(num_steps):
            began = time.perf_counter()
            self.take(self.launch(decode=tuple(DecodeRow(slot, end) for slot, end in self.ends.items())))
            times.append(time.perf_counter() - began)
            self.ends = {slot: end + 1 for slot, end in self.ends.items()}
        return times


def long() -> None:
    """One row of 128,000 tokens beside 31 short ones: equal to plain operations; its time, and that of chunks behind as many."""
    lengths = [LONG] + [SHORT] * NUM_SHORT
    plays = {}
    for kernels in (False, KERNELS):
        loaded = random_model(TINY, torch.float32, LONG + 1000)
        backend = TorchBackend(loaded, num_slots=len(lengths), kernels=kernels)
        began = time.perf_counter()
        play = Mixed(backend, lengths, SCORED)
        play.decode(8)
        play.end()
        plays[kernels] = play
        print(f"float32, {LONG:,} tokens, kernels {kernels}: {time.perf_counter() - began:.1f} s", flush=True)
        backend.close()
    found, expected = plays[KERNELS], plays[False]
    worst = 0.0
    for slot, tokens in expected.tokens.items():
        assert len(tokens) == 9
        for place, token in enumerate(tokens):
            mine, theirs = found.logprobs[slot][place], expected.logprobs[slot][place]
            worst = max(worst, *(abs(a - b) for a, b in zip(mine.top_logprobs, theirs.top_logprobs)))
            if found.tokens[slot][place] != token:
                assert abs(theirs.top_logprobs[0] - theirs.top_logprobs[1]) < NEAR, f"slot {slot} says something else"
                break  # two level tokens: two different texts from here on
    print(f"kernels and plain operations differ by {worst:.1e} at most")
    assert worst < NEAR, "kernels compute something else at long contexts"
    step_times(lengths)


def step_times(lengths: list[int]) -> None:
    loaded = random_model(QWEN3_5_0_8B if DEVICE == "cuda" else TINY, HALF, LONG + 5 * CHUNK)
    backend = TorchBackend(loaded, num_slots=len(lengths), kernels=KERNELS, pool_bytes=None)
    backend.limit_memory(12_000_000_000)
    for rows in ([SHORT] * len(lengths), lengths):
        play = Mixed(backend, rows, GREEDY)
        times = play.decode(40)
        play.end()
        print(f"{len(rows)} rows, the longest {max(rows):,} tokens: {statistics.median(times[10:]) * 1e3:.3f} ms a step", flush=True)
    for length in (GRID, CHUNK):
        print(f"a chunk of {length:,} tokens behind {LONG:,}: {chunk_ms(backend, length):.2f} ms", flush=True)
    backend.close()


def chunk_ms(backend: TorchBackend, length: int) -> float:
    play, times, start = Requests(backend, 1), [], 0
    prompt = np.full(LONG, 10, dtype=np.int32)
    play.take(play.launch(admit=(Admit(1, GREEDY, (), prompt, seed=1),)))
    for size in [CHUNK] * (LONG // CHUNK) + [length] * 4:
        began = time.perf_counter()
        play.take(play.launch(prefill=(PrefillRow(1, start, prompt[:size]),)))
        times.append(time.perf_counter() - began)
        start += size
    play.end()
    return statistics.median(times[-4:]) * 1e3


# ---- a budget ----------------------------------------------------------------------------------


def budget() -> None:
    """In a process of its own, so that all that it holds is what the budget is for."""
    done = subprocess.run([sys.executable, __file__], timeout=150, check=False)
    assert done.returncode == 0, "the budget was not kept: see above"


def device_used() -> int:
    """Of the whole GPU, as nvidia-smi says: bytes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20  # MiB


class Traffic:
    """Requests that come and go at random, and a tree of what they left, within `capacity` bytes."""

    def __init__(self, backend: TorchBackend, capacity: int, seed: int = 0) -> None:
        self.backend, self.capacity = backend, capacity
        self.rng = np.random.default_rng(seed)
        self.free = list(range(NUM_ROWS, 0, -1))
        self.running: dict[int, list[int]] = {}  # by slot: prompt, position, end
        self.kept: list[Any] = []  # payloads
        self.num_operations = self.steps = self.most_running = 0

    def held(self) -> int:
        rows = sum(self.backend.row_bytes(end) for _, _, end in self.running.values())
        return rows + sum(payload.nbytes for payload in self.kept)

    def evict(self, number: int | None = None) -> None:
        number = int(self.rng.integers(len(self.kept))) if number is None else number
        payload = self.kept.pop(number)
        if payload.num_tokens > 1 and self.rng.random() < 0.5:  # scattered cells
            payload, rest = payload.split(int(self.rng.integers(1, payload.num_tokens)))
            self.kept.append(rest)
        payload.release()
        self.num_operations += 1

    def step(self) -> None:
        rng, retire, admit, prefill = self.rng, [], [], []
        for slot, (prompt, position, end) in list(self.running.items()):
            if position >= end or rng.random() < 0.02:
                retire.append(Retire(slot, 0, position, captures=bool(rng.random() < 0.5)))
                del self.running[slot]
                self.free.append(slot)
        decode = [DecodeRow(slot, row[1], checkpoint=bool(rng.random() < 0.05)) for slot, row in self.running.items()]
        for _ in range(int(rng.integers(5))):
            length = int(rng.integers(1, 700))
            end = length + int(rng.integers(2, 40))
            plan = self.plan(retire, admit, decode, prefill)
            # What is captured is held by rows and tree until it is released: counted twice here.
            most = self.held() + self.backend.transient_bytes(plan) + 3 * self.backend.row_bytes(end)
            while self.kept and most > self.capacity:
                most -= self.kept[-1].nbytes
                self.evict(len(self.kept) - 1)
                most = self.held() + self.backend.transient_bytes(plan) + 3 * self.backend.row_bytes(end)
            if not self.free or most > self.capacity:
                break
            slot = self.free.pop(0)
            prompt = rng.integers(10, self.backend.spec.vocab_size, length).astype(np.int32)
            params = (GREEDY, DRAWN, PENALISED, SamplingParams(temperature=1.0, top_p=0.9, logprobs=5))[int(rng.integers(4))]
            admit.append(Admit(slot, params, (), prompt, seed=self.steps))
            marks = tuple(sorted({*range(64, length, 256), length}))
            prefill.append(PrefillRow(slot, 0, prompt, samples=True, captures=bool(rng.random() < 0.5), checkpoints=marks))
            self.running[slot] = [length, length, end]
        plan = self.plan(retire, admit, decode, prefill)
        while self.kept and self.held() + self.backend.transient_bytes(plan) > self.capacity:
            self.evict()
        self.steps += 1
        result = self.backend.launch(plan).wait()
        for row in decode:
            self.running[row.slot][1] += 1
        self.most_running = max(self.most_running, len(self.running))
        self.keep(result.captures)
        for _ in range(int(rng.integers(3))):
            if self.kept:
                self.evict()
        self.num_operations += len(retire) + len(admit) + len(result.captures)

    def plan(self, retire: Any, admit: Any, decode: Any, prefill: Any) -> StepPlan:
        return StepPlan(self.steps, admit=tuple(admit), retire=tuple(retire), decode=tuple(decode), prefill=tuple(prefill))

    def keep(self, captures: tuple[Capture, ...]) -> None:
        for capture in captures:
            self.kept += capture.payloads

    def end(self) -> None:
        self.backend.launch(self.plan([Retire(slot) for slot in self.running], [], [], [])).wait()
        for payload in self.kept:
            payload.release()
        pools = self.backend.runner.pools
        pools.arena.check_integrity()
        assert pools.arena.used_bytes == 0, "something is still held"


def serve_within(budget_bytes: int, look: Callable[[], tuple[int, int]]) -> None:
    """`look`: what torch reserved at most, and what the GPU says of this process: bytes."""
    backend = TorchBackend(random_model(SERVED_SHAPE, HALF, 32_768), num_slots=NUM_ROWS, pool_bytes=None, kernels=KERNELS)
    began = time.perf_counter()
    capacity = backend.limit_memory(budget_bytes)
    print(f"loaded in {time.perf_counter() - began:.1f} s; {backend._memory}", flush=True)
    assert capacity > NUM_ROWS * backend.row_bytes(739), "32 rows do not fit"
    traffic, most, began = Traffic(backend, capacity), (0, 0), time.perf_counter()
    while traffic.num_operations < NUM_OPERATIONS and time.perf_counter() - began < BUDGET_SECONDS:
        backend.make_way(busy=traffic.steps % 100 < 90)
        traffic.step()
        if traffic.steps % 50 == 0:
            most = tuple(map(max, most, look()))
    most = tuple(map(max, most, look()))
    traffic.end()
    graphs = sum(len(steps.graphs) for steps in backend.runner.captured())
    print(f"{traffic.num_operations:,} operations in {traffic.steps:,} steps and {time.perf_counter() - began:.1f} s, {traffic.most_running} rows at most, {graphs} graphs")
    print(f"reserved at most {most[0]:,}, on the device at most {most[1]:,} bytes of {budget_bytes:,}: {max(most) / budget_bytes:.1%}", flush=True)
    assert max(most) <= budget_bytes * MOST_OVER, "more than the budget"
    assert traffic.most_running == NUM_ROWS, "the rows never all ran"
    assert traffic.num_operations >= NUM_OPERATIONS, "too slow: fewer operations than asked for"
    assert all(steps.works for steps in backend.runner.captured()), "captures failed: see the log"
    backend.close()
    again = TorchBackend(random_model(SERVED_SHAPE, HALF, 32_768), num_slots=NUM_ROWS, pool_bytes=None, kernels=KERNELS)
    found = again.limit_memory(budget_bytes)
    print(f"after close() another has {found:,} bytes for requests; the first had {capacity:,}")
    assert found > 0.9 * capacity, "close() did not free everything"


def main() -> None:
    import logging

    logging.basicConfig(level=logging.INFO)
    before = device_used()  # before this process has a context
    torch.zeros(1, device=DEVICE)

    def look() -> tuple[int, int]:
        return torch.cuda.max_memory_reserved(), device_used() - before

    serve_within(BUDGET_BYTES, look)


# ---- captures ----------------------------------------------------------------------------------


class Breaking(CudaGraphs):
    """Synchronizes inside every capture, which CUDA forbids: the capture is invalid from then on."""

    def __init__(self, device: torch.device, *, quietly: bool) -> None:
        super().__init__(device)
        self.quietly, self.num_broken = quietly, 0

    def record(self, run: Callable[[], Any]) -> Any:
        def broken() -> Any:
            result = run()
            self.num_broken += 1
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                if not self.quietly:  # else CUDA itself finds it, at the capture's end
                    raise
            return result

        return super().record(broken)


def captures() -> None:
    loaded, device = random_model(TINY, torch.float32, 4096), torch.device(DEVICE)
    expected = reply(TorchBackend(loaded, num_slots=4, kernels=False), 24)
    for quietly in (False, True):
        recorder = Breaking(device, quietly=quietly)
        backend = TorchBackend(loaded, num_slots=4, recorder=recorder)
        found = reply(backend, 24)
        assert found == expected, f"after an invalid capture it says {found}, not {expected}"
        assert recorder.num_broken == 2, "a decode step and a chunk: each is tried once"
        assert not any(steps.works for steps in backend.runner.captured())
        assert not torch.cuda.is_current_stream_capturing()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        reply(backend, 200)  # an allocator in capture mode keeps what other streams have read
        torch.cuda.synchronize()
        leaked = torch.cuda.memory_allocated() - before
        assert leaked < LEAK_BYTES, f"{leaked:,} bytes more after 200 steps"
        assert torch.rand(4, device=DEVICE).isfinite().all()
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(4, device=DEVICE)
            torch.cuda.synchronize()
            graph = CudaGraphs(device).record(lambda: x * 2)
            graph.replay()
            torch.cuda.synchronize()
            assert graph.result.tolist() == [2.0] * 4
        backend.close()
        print(f"captures that are invalid{' and found so at their end' if quietly else ''}: the same tokens, {leaked:,} bytes leaked, and captures work again", flush=True)


def reply(backend: TorchBackend, num_steps: int) -> dict[int, list[int]]:
    play = Play(backend, 3, 150, GREEDY)
    play.decode(num_steps)
    play.end()
    return play.tokens


if __name__ == "__main__":
    with torch.inference_mode():
        main()
