"""How fast are decode steps and prompts?"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from torch_gpu.plays import CONTEXT, DRAWN, GREEDY, Play, gpu_ms, random_model

from pippin.backends.base import Admit, PrefillRow, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import LoadedModel
from pippin.backends.torch.step.decode_inputs import Choice
from pippin.backends.torch.step.words import StepSize
from pippin.types import SamplingParams


def replay_ms(backend: TorchBackend, play: Play, params: SamplingParams) -> float:
    """One replay after the other, nothing of the host in between."""
    steps = backend.runner.forwards.steps
    assert steps is not None
    sizes = [size for size, _ in steps.graphs if size == StepSize(size.num_rows) and size.num_rows >= len(play.slots)]
    graph = steps.graphs[min(sizes), Choice.GREEDY if params is GREEDY else Choice.DRAWN]
    with torch.cuda.stream(backend._streams._forward):
        return gpu_ms(lambda: [graph.replay() for _ in range(20)], repeats=8) / 20


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


def prefill() -> None:
    time_prompts(random_model())


def time_prompts(loaded: LoadedModel) -> None:
    for kernels in (True, False):
        backend = TorchBackend(loaded, num_slots=4, pool_bytes=16 << 30, kernels=kernels)
        prompt = np.random.default_rng(0).integers(10, backend.spec.vocab_size, 8192).astype(np.int32)
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
