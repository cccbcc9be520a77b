"""The torch backend on an NVIDIA GPU: is it right, how fast is it, and where does a step's time go?

    python tools/torch_gpu_check.py [--only correct,races,decode]

Correctness is checked on a tiny hybrid of random weights: kernels and captured graphs against plain
operations on the GPU and on the CPU, and 200 random schedules, launched ahead of a GPU that is held
up, against the same ones with a wait after each step. Times are of Qwen3.5-0.8B's shape in bfloat16
with random weights. Every section stands alone: one that fails prints why, and the next one runs.
Needs torch, triton, safetensors and numpy; nothing is downloaded.

How fast a server is takes more packages (those of pippin[torch], without mlx):

    python tools/make_random_hybrid.py /tmp/hybrid
    python -m pippin serve --backend torch --model /tmp/hybrid --max-running 64 --port 8000 &
    python -m pippin bench churn --url http://127.0.0.1:8000 --clients 64 --seconds 60
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

try:
    import msgspec  # noqa: F401
except ImportError:  # a machine with torch alone: rows of plans need no more of it than this

    class Struct:
        def __init_subclass__(cls, **_: Any) -> None: ...

        def __init__(self, *values: Any, **named: Any) -> None:
            names = list(type(self).__annotations__)
            for name, value in [*zip(names, values), *named.items()]:
                setattr(self, name, value)

    sys.modules["msgspec"] = types.SimpleNamespace(Struct=Struct)  # type: ignore[assignment]

import numpy as np
import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.capture import CudaGraphs
from pippin.backends.torch.config import read_shape
from pippin.backends.torch.load import LoadedModel, load
from pippin.backends.torch.models.build import build_decoder
from pippin.types import SamplingParams

from make_random_hybrid import QWEN3_5_0_8B, TINY, RandomWeights, write_weights  # isort: skip

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)
CONTEXT = 512
PENALISED = SamplingParams(temperature=1.0, frequency_penalty=0.5)
LIMIT_SECONDS = 100.0

@cache
def random_model() -> LoadedModel:
    device, shape = torch.device("cuda"), read_shape(QWEN3_5_0_8B)
    weights = RandomWeights(shape, torch.bfloat16, device)
    with torch.inference_mode():
        decoder = build_decoder(shape, weights, torch.bfloat16, device, shape.max_len)
    return LoadedModel(decoder, "random", shape.max_len)


class Play:
    """Requests through the backend's own launches, two steps in flight."""

    def __init__(self, backend: TorchBackend, num_rows: int, context: int, params: SamplingParams = GREEDY) -> None:
        self.backend, self.context = backend, context
        self.slots = range(1, num_rows + 1)
        self.steps = 0
        rng = np.random.default_rng(0)
        vocab = backend.spec.vocab_size
        prompts = {s: rng.integers(10, vocab, context).astype(np.int32) for s in self.slots}
        self.tokens: dict[int, list[int]] = {slot: [] for slot in self.slots}
        self.logprobs: dict[int, list[Any]] = {slot: [] for slot in self.slots}
        for slot, prompt in prompts.items():
            admit = Admit(slot, params, (), prompt, seed=slot)
            row = PrefillRow(slot, 0, prompt, samples=True)
            self.take(self.launch(admit=(admit,), prefill=(row,)).wait())

    def launch(self, **fields: Any) -> Any:
        self.steps += 1
        return self.backend.launch(StepPlan(self.steps, **fields))

    def take(self, result: Any) -> None:
        for slot, token in result.tokens.items():
            self.tokens[slot].append(token)
            self.logprobs[slot].append(result.logprobs.get(slot))

    def decode(self, num_steps: int) -> list[float]:
        """Seconds between results."""
        times, waiting = [], None
        for _ in range(num_steps):
            began = time.perf_counter()
            rows = tuple(DecodeRow(slot, self.context) for slot in self.slots)
            self.context += 1
            launched = self.launch(decode=rows)
            if waiting is not None:
                self.take(waiting.wait())
            waiting = launched
            times.append(time.perf_counter() - began)
        self.take(waiting.wait())
        return times

    def end(self) -> None:
        self.launch(retire=tuple(Retire(slot) for slot in self.slots)).wait()


def section(name: str, run: Callable[[], None]) -> None:
    began = time.perf_counter()
    print(f"\n== {name}", flush=True)
    try:
        run()
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
    print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)


def gpu_ms(run: Callable[[], object], repeats: int = 30) -> float:
    """Median milliseconds on the GPU, launches included if they are slower."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def replayed_ms(run: Callable[[], object]) -> float:
    """The same of a captured graph, on a stream of its own: the usual one takes no captures."""
    with torch.cuda.stream(torch.cuda.Stream()):
        run()
        torch.cuda.synchronize()
        return gpu_ms(CudaGraphs().record(run).replay, repeats=5)


# ---- is it right? ------------------------------------------------------------------------------


def environment() -> None:
    import importlib.metadata as metadata

    for name in ("torch", "triton", "numpy"):
        try:
            print(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            print(name, "not installed")
    print(torch.cuda.get_device_name(), torch.version.cuda)


WAYS = (("cpu, plain", "cpu", False), ("gpu, plain", "cuda", False), ("gpu, kernels", "cuda", True))


def correct() -> None:
    """A tiny hybrid on three ways: the same tokens in float32, much the same numbers in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), TINY, torch.float32)
        for dtype in ("float32", "bfloat16"):
            backends = {
                name: TorchBackend(load(Path(folder), dtype=dtype, device=torch.device(device)), num_slots=8, kernels=kernels)
                for name, device, kernels in WAYS
            }
            for rows in (1, 3):
                if dtype == "float32":
                    for params in (GREEDY, DRAWN, PENALISED):
                        same_tokens(backends, rows, params)
                near_numbers(dtype, backends, rows)
            for backend in backends.values():
                backend._pools.arena.check_integrity()


def same_tokens(backends: dict[str, TorchBackend], num_rows: int, params: SamplingParams) -> None:
    said = {name: reply_of(backend, num_rows, params).tokens for name, backend in backends.items()}
    expected = said["cpu, plain"]
    for name, tokens in said.items():
        same = tokens == expected
        print(f"float32, {num_rows} rows, temperature {params.temperature}: {name}: {'same' if same else 'DIFFERS'}", flush=True)
        if not same:
            print("   ", tokens[1][:16], "\n   ", expected[1][:16])


def reply_of(backend: TorchBackend, num_rows: int, params: SamplingParams) -> Play:
    play = Play(backend, num_rows, 150, params)
    play.decode(24)
    play.end()
    return play


def near_numbers(dtype: str, backends: dict[str, TorchBackend], num_rows: int) -> None:
    """Log probabilities of the five likeliest tokens, as long as the same tokens were said."""
    params = SamplingParams(temperature=0.0, logprobs=5)
    plays = {name: reply_of(backend, num_rows, params) for name, backend in backends.items()}
    expected = plays["cpu, plain"]
    for name, play in plays.items():
        worst, compared = 0.0, 0
        for slot in play.slots:
            pairs = zip(play.tokens[slot], expected.tokens[slot], play.logprobs[slot], expected.logprobs[slot])
            for token, other, found, wanted in pairs:
                if token != other:
                    break
                compared += 1
                worst = max(worst, *(abs(a - b) for a, b in zip(found.top_logprobs, wanted.top_logprobs)))
        print(f"{dtype}, {num_rows} rows: {name}: log probabilities differ by {worst:.1e} at most, in {compared} tokens", flush=True)


# ---- does it race? -----------------------------------------------------------------------------


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
    """A step: what it said, how it was run, and checksums of what it captured."""

    tokens: dict[int, int]
    how: list[str]
    sums: list[tuple[str, torch.Tensor]]

    @property
    def bits(self) -> list[tuple[str, int]]:
        return [(name, int(value)) for name, value in self.sums]


def run_plans(backend: TorchBackend, plans: list[StepPlan], *, ahead: int) -> list[Ran]:
    """With so many steps in flight behind a kernel that only spins; 0: a wait after each."""
    results, pending = [], []

    def commit() -> None:
        step, how = pending.pop(0)
        result = step.wait()
        with backend._streams.forward():  # behind what is in flight: nobody waits for it here
            sums = [pair for capture in result.captures for pair in checksums(backend, capture)]
        for capture in result.captures:
            capture.release()
        results.append(Ran(dict(result.tokens), how, sums))

    for plan in plans:
        if ahead:
            with backend._streams.forward():
                torch.cuda._sleep(1_000_000)
        with replays(backend) as how:
            step = backend.launch(plan)
        if plan.num_prefill_tokens:
            how.append(f"eager, {plan.num_prefill_tokens} tokens of slots {[row.slot for row in plan.prefill]}")
        pending.append((step, how))
        if not ahead:
            torch.cuda.synchronize()
        while len(pending) > ahead:
            commit()
    while pending:
        commit()
    torch.cuda.synchronize()  # for the checksums
    return results


@contextmanager
def replays(backend: TorchBackend) -> Iterator[list[str]]:
    """Notes the decode steps that are run meanwhile."""
    how: list[str] = []
    steps = backend._decode_steps
    if steps is None:  # a shape that the kernels do not take
        how.append("plain operations")
        yield how
        return
    run = steps.run

    def noted(words: np.ndarray, choice: Any) -> Any:
        in_place = [bool(same) for same in words[3] == words[4]]
        way = "replay" if steps._recorder else "eager"
        how.append(f"{way} of width {words.shape[1]}, {choice.name}, slots {words[0].tolist()}, states in place {in_place}")
        return run(words, choice)

    steps.run = noted  # type: ignore[method-assign]
    try:
        yield how
    finally:
        del steps.run


def checksums(backend: TorchBackend, capture: Any) -> list[tuple[str, torch.Tensor]]:
    """Sums of bits, which do not depend on their order. Made on the device."""
    pools, found = backend._pools, []
    for payload in capture.kv.values():
        bits = pools.cell_bytes(payload.cells).view(torch.int32)
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
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), TINY, torch.float32)
        backend = TorchBackend(load(Path(folder), dtype="float32"), num_slots=4, debug=True)
    others = []
    for seed in range(200):
        plans = random_plans(random.Random(seed), 12)
        expected = run_plans(backend, plans, ahead=0)
        found = run_plans(backend, plans, ahead=1 + seed % 3)
        if not same_said(found, expected):
            explain(backend, plans, expected, found, ahead=1 + seed % 3)
            raise AssertionError(f"schedule {seed} says otherwise when it is launched ahead")
        if not same_bits(found, expected):
            others.append(seed)
        backend._pools.arena.check_integrity()
        assert backend._pools.arena.used_bytes == 0
        if seed % 50 == 49:
            print(f"{seed + 1} schedules say what they say with a wait after each step", flush=True)
    print(f"schedules that kept other bits, though they said the same: {others or 'none'}")
    if others:
        seed = others[0]
        repeat(backend, random_plans(random.Random(seed), 12), ahead=1 + seed % 3)


def explain(backend: TorchBackend, plans: list[StepPlan], expected: list[Ran], found: list[Ran], *, ahead: int) -> None:
    """The schedule, where the two runs part, and whether that happens with a wait, too."""
    for plan, ran in zip(plans, expected):
        print(f"step {plan.step}: {describe(plan)}\n    {'; '.join(ran.how) or 'nothing runs'}; said {ran.tokens}")
    print_first_difference(expected, found)
    repeat(backend, plans, ahead=ahead)


def describe(plan: StepPlan) -> str:
    starts = {admit.slot: "greedy" if admit.params is GREEDY else "drawn" if admit.params is DRAWN else "penalised" for admit in plan.admit}
    chunks = [f"{row.slot}: {row.start} to {row.end}{', samples' * row.samples}" for row in plan.prefill]
    decodes = [f"{row.slot} at {row.position}{', kept' * row.checkpoint}" for row in plan.decode]
    return f"retire {[row.slot for row in plan.retire]}, admit {starts}, chunks {chunks}, decode {decodes}"


def print_first_difference(expected: list[Ran], found: list[Ran]) -> None:
    for number, (wanted, got) in enumerate(zip(expected, found)):
        bits = [name for (name, a), (_, b) in zip(wanted.bits, got.bits) if a != b]
        slots = [slot for slot in wanted.tokens if wanted.tokens[slot] != got.tokens.get(slot)]
        if bits:
            print(f"step {number}: other bits in {bits}")
        if slots:
            print(f"step {number} is the first to say otherwise, in slots {slots}: {wanted.tokens} with waits, {got.tokens} here")
            print(f"    with waits: {'; '.join(wanted.how)}\n    here:       {'; '.join(got.how)}", flush=True)
            return


def repeat(backend: TorchBackend, plans: list[StepPlan], *, ahead: int) -> None:
    """Five times each way: a race with the host shows only ahead, one inside a kernel in both."""
    first = run_plans(backend, plans, ahead=0)
    for way in (0, ahead):
        runs = [run_plans(backend, plans, ahead=way) for _ in range(5)]
        said, bits = (sum(same(run, first) for run in runs) for same in (same_said, same_bits))
        print(f"{way} steps ahead: {said} of 5 say what another run with waits said, {bits} of 5 keep the same bits", flush=True)
        for run in runs:
            if not same_said(run, first):
                print_first_difference(first, run)


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


# ---- how fast? ---------------------------------------------------------------------------------


def replay_ms(backend: TorchBackend, play: Play, params: SamplingParams) -> float:
    """One replay after the other, nothing of the host in between."""
    steps = backend._decode_steps
    assert steps is not None
    graphs = {key: g for key, g in steps._graphs.items() if key[0] >= len(play.slots)}
    width, choice = min(key for key in graphs if key[1] == (0 if params is GREEDY else 1))
    graph = steps._graphs[width, choice]
    with torch.cuda.stream(backend._streams._forward):
        return gpu_ms(lambda: [graph.step.replay() for _ in range(20)], repeats=8) / 20


def decode() -> None:
    table = []
    backend = TorchBackend(random_model(), num_slots=64, pool_bytes=8 << 30)
    for num_rows in (1, 2, 4, 8, 32, 64):
        for params, name in ((GREEDY, "greedy"), (DRAWN, "drawn")):
            play = Play(backend, num_rows, CONTEXT, params)
            began = time.perf_counter()
            play.decode(2)
            captured = time.perf_counter() - began
            wall = statistics.median(play.decode(60)[20:]) * 1e3
            device = replay_ms(backend, play, params)
            play.end()
            table.append((num_rows, name, device, wall))
            print(f"{num_rows:3} rows, {name}: replay {device:.3f} ms, served {wall:.3f} ms a step, first {captured:.1f} s", flush=True)
    print("\n| rows | tokens | replay, ms | served, ms a step |\n|---|---|---|---|")
    for num_rows, name, device, wall in table:
        print(f"| {num_rows} | {name} | {device:.3f} | {wall:.3f} |")


def recurrence() -> None:
    """Ways to go through the states of one layer, against the time that their bytes take."""
    from pippin.backends.torch.kernels.delta_step import StateTile, delta_step, state_tile_for

    backend = TorchBackend(random_model(), num_slots=4, pool_bytes=8 << 30)
    layer = random_model().decoder.layers[0]
    mixer, state = layer.mixer, backend._pools.recurrent[layer.number]
    for num_rows in (1, 8, 32, 64):
        projected = torch.randn(num_rows, mixer.project.weight.shape[0], device="cuda").bfloat16()
        slabs = torch.arange(2, 2 + num_rows, device="cuda", dtype=torch.int32)
        floor = num_rows * 16 * 128 * 128 * 4 * 2 / 4.3e12 * 1e6
        found = {}
        tiles = [StateTile(c, w, s) for c in (16, 32, 64, 128) for w in (2, 4, 8) for s in (1, 2, 3) if c * s <= 192]
        for tile in tiles:
            found[tile] = replayed_ms(lambda t=tile: [delta_step(projected, mixer, state, slabs, slabs, t) for _ in range(20)]) / 20 * 1e3
        ours = state_tile_for(num_rows * 16, 128)
        best = sorted(found.items(), key=lambda item: item[1])[:4]
        names = "; ".join(f"{t.columns} columns, {t.num_warps} warps, {t.num_stages} stages {us:.1f}" for t, us in best)
        print(f"{num_rows} rows: bytes {floor:.1f} us; ours {found[ours]:.1f}; {names}", flush=True)


def prefill() -> None:
    for kernels in (True, False):
        backend = TorchBackend(random_model(), num_slots=4, pool_bytes=16 << 30, kernels=kernels)
        prompt = np.random.default_rng(0).integers(10, 200_000, 8192).astype(np.int32)
        for chunk, every in ((8192, 0), (8192, 1024), (8192, 64), (2048, 0), (512, 0)):
            if not kernels and (chunk, every) != (8192, 0):
                continue
            times = []
            for turn in range(4):
                steps = [StepPlan(turn * 100, admit=(Admit(1, GREEDY, (), prompt, 1),))]
                for start in range(0, len(prompt), chunk):
                    marks = tuple(range(start + every, start + chunk + 1, every)) if every else ()
                    row = PrefillRow(1, start, prompt[start : start + chunk], samples=start + chunk >= len(prompt), captures=bool(every), checkpoints=marks)
                    steps.append(StepPlan(turn * 100 + len(steps), prefill=(row,)))
                began = time.perf_counter()
                pending = [backend.launch(plan) for plan in steps]
                launched = time.perf_counter() - began
                results = [step.wait() for step in pending]
                torch.cuda.synchronize()
                times.append((time.perf_counter() - began, launched))
                for result in results:
                    for capture in result.captures:
                        capture.release()
                backend.launch(StepPlan(turn * 100 + 99, retire=(Retire(1),))).wait()
            best, launching = min(times[1:])
            print(f"kernels {kernels}, 8,192 tokens in chunks of {chunk}, states every {every}: {best * 1e3:.1f} ms ({launching * 1e3:.1f} of launching), first {times[0][0]:.1f} s", flush=True)


def products() -> None:
    """Tiles of the product kernel, for the shapes of a step of one row; cuBLAS beside them."""
    import torch.nn.functional as F  # noqa: N812

    from pippin.backends.torch.kernels.products import Tile, product

    device = torch.device("cuda")
    shapes = {"in_proj": (8224, 1024, False), "out_proj": (1024, 2048, False), "gate_up": (7168, 1024, True), "down": (1024, 3584, False), "head": (248_320, 1024, False)}
    for name, (num_out, size, gated) in shapes.items():
        copies = max(1, (200 << 20) // (num_out * size * 2))  # more than the L2 holds
        weights = [torch.randn(num_out, size, device=device).bfloat16() * 0.02 for _ in range(copies)]
        x = torch.randn(1, size, device=device).bfloat16()
        found = {}

        def timed(run: Callable[[torch.Tensor], object]) -> float:
            return replayed_ms(lambda: [run(w) for w in weights]) / copies * 1e3

        found["cuBLAS"] = timed(lambda w: F.linear(x, w))
        ns = (4, 8, 16, 32)
        ks = (256, 512, 1024)
        for n in ns:
            for k in ks:
                for warps, stages in ((4, 3), (4, 5), (8, 3)) if name != "head" else ((4, 3),):
                    if n * k > 16384 or k > size:
                        continue
                    tile = Tile(n, k, warps, stages)
                    try:
                        found[f"n{n} k{k} w{warps} s{stages}"] = timed(lambda w, t=tile: product(x, w, swiglu=gated, tile=t))
                    except Exception as error:  # noqa: BLE001
                        found[f"n{n} k{k} w{warps} s{stages}: {type(error).__name__}"] = 1e9
        best = sorted(found.items(), key=lambda item: item[1])[:4]
        floor = num_out * size * 2 / 4.3e12 * 1e6
        print(f"{name}: read {floor:.1f} us; cuBLAS {found['cuBLAS']:.1f}; " + "; ".join(f"{key} {us:.1f}" for key, us in best), flush=True)
        if time.perf_counter() - STARTED > LIMIT_SECONDS:
            return


def profile() -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    backend = TorchBackend(random_model(), num_slots=64, pool_bytes=8 << 30)
    for num_rows in (1, 32):
        play = Play(backend, num_rows, CONTEXT)
        play.decode(5)
        with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            play.decode(10)
            torch.cuda.synchronize()
        play.end()
        print(f"{num_rows} rows, 10 steps")
        print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=40))
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        Play(backend, 1, 8192).end()
        torch.cuda.synchronize()
    print("a prompt of 8,192 tokens")
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=40))


STARTED = time.perf_counter()
SECTIONS = {
    "correct": correct,
    "environment": environment,
    "races": races,
    "waits": waits,
    "decode": decode,
    "prefill": prefill,
    "recurrence": recurrence,
    "profile": profile,
    "products": products,
}
USUAL = [name for name in SECTIONS if name != "products"]  # which takes longer than all the others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(USUAL), help="sections, with commas between")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs an NVIDIA GPU")
    for name in args.only.split(","):
        if time.perf_counter() - STARTED > LIMIT_SECONDS:
            print(f"no time left for {name}")
            continue
        with torch.inference_mode():
            section(name, SECTIONS[name])
    print(f"\n{time.perf_counter() - STARTED:.0f} s in all")


if __name__ == "__main__":
    main()
