"""What the sections of `torch_gpu_check.py` share: a model of random weights, requests, clocks."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import numpy as np
import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.config import read_shape
from pippin.backends.torch.load import LoadedModel, load
from pippin.backends.torch.models.build import build_decoder
from pippin.backends.torch.step.decode_inputs import Choice
from pippin.backends.torch.step.words import StepSize
from pippin.types import SamplingParams

from make_random_hybrid import QWEN3_5_0_8B, TINY, RandomWeights, write_weights  # isort: skip

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_k=20, top_p=0.95)
PENALISED = SamplingParams(temperature=1.0, frequency_penalty=0.5)
CONTEXT = 512


def make_model(config: dict[str, Any], dtype: torch.dtype, device: str = "cuda") -> LoadedModel:
    shape, where = read_shape(config), torch.device(device)
    with torch.inference_mode():
        decoder = build_decoder(shape, RandomWeights(shape, dtype, where), dtype, where, shape.max_len)
    return LoadedModel(decoder, "random", shape.max_len)


def tiny_model(dtype: str, config: dict[str, Any] = TINY, device: str | None = None) -> LoadedModel:
    """Written to a file and loaded from it."""
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), config, torch.float32)
        return load(Path(folder), dtype=dtype, device=torch.device(device) if device else None)


@cache
def random_model() -> LoadedModel:
    return make_model(QWEN3_5_0_8B, torch.bfloat16)


class Requests:
    """Slots 1, 2 ... through the backend's own launches, and what they sampled."""

    def __init__(self, backend: TorchBackend, num_rows: int) -> None:
        self.backend, self.steps = backend, 0
        self.slots = range(1, num_rows + 1)
        self.tokens: dict[int, list[int]] = {slot: [] for slot in self.slots}
        self.logprobs: dict[int, list[Any]] = {slot: [] for slot in self.slots}

    def launch(self, **fields: Any) -> Any:
        self.steps += 1
        return self.backend.launch(StepPlan(self.steps, **fields))

    def take(self, step: Any) -> None:
        result = step.wait()
        for slot, tokens in result.tokens.items():
            self.tokens[slot] += tokens
        for slot, scored in result.logprobs.items():
            self.logprobs[slot] += scored
        for capture in result.captures:
            capture.release()

    def end(self) -> None:
        self.take(self.launch(retire=tuple(Retire(slot) for slot in self.slots)))


class Play(Requests):
    """Prompts of one length, then two steps in flight."""

    def __init__(self, backend: TorchBackend, num_rows: int, context: int, params: SamplingParams = GREEDY) -> None:
        super().__init__(backend, num_rows)
        self.context = context
        rng = np.random.default_rng(0)
        vocab = backend.spec.vocab_size
        prompts = {s: rng.integers(10, vocab, context).astype(np.int32) for s in self.slots}
        for slot, prompt in prompts.items():
            admit = Admit(slot, params, (), prompt, seed=slot)
            row = PrefillRow(slot, 0, prompt, samples=True)
            self.take(self.launch(admit=(admit,), prefill=(row,)))

    def decode(self, num_steps: int) -> list[float]:
        """Seconds between results."""
        times, waiting = [], None
        for _ in range(num_steps):
            began = time.perf_counter()
            rows = tuple(DecodeRow(slot, self.context) for slot in self.slots)
            self.context += 1
            launched = self.launch(decode=rows)
            if waiting is not None:
                self.take(waiting)
            waiting = launched
            times.append(time.perf_counter() - began)
        self.take(waiting)
        return times


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


def replay_ms(backend: TorchBackend, play: Play, params: SamplingParams) -> float:
    """One replay after the other, nothing of the host in between."""
    steps = backend.runner.forwards.steps
    assert steps is not None
    sizes = [size for size, _ in steps.graphs if size == StepSize(size.num_rows) and size.num_rows >= len(play.slots)]
    graph = steps.graphs[min(sizes), Choice.GREEDY if params is GREEDY else Choice.DRAWN]
    with torch.cuda.stream(backend._streams._forward):
        return gpu_ms(lambda: [graph.replay() for _ in range(20)], repeats=8) / 20
