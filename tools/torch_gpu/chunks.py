"""Captured chunks of prompts against launched ones: do they say the same, and what do they take?"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from torch_gpu.plays import DRAWN, GREEDY, Requests, random_model

from make_random_hybrid import TINY, write_weights
from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import load
from pippin.backends.torch.step.sizes import ROOMS, Room
from pippin.types import SamplingParams

HELP = "chunks of prompts are not captured (the warning above says why): CHUNK_GRAPHS = False in backends/torch/backend.py launches them"
NEAR = {"float32": 1e-2, "bfloat16": 0.5}  # log probabilities after another order of sums


def chunks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_weights(Path(folder), TINY, torch.float32)
        for dtype in NEAR:
            loaded = load(Path(folder), dtype=dtype)
            launched, captured = (TorchBackend(loaded, num_slots=16, chunk_graphs=on) for on in (False, True))
            rooms = ROOMS if dtype == "float32" else ROOMS[::5]
            for room in rooms:
                compare(launched, captured, room, dtype)
            print(f"{dtype}: prompts in {len(rooms)} rooms, captured and launched, say the same", flush=True)
    launched, captured = (TorchBackend(random_model(), num_slots=16, pool_bytes=8 << 30, chunk_graphs=on) for on in (False, True))
    print("\n| tokens | rows | launched, ms | captured, ms | captured first, s |\n|---|---|---|---|---|")
    for room in ROOMS:
        (before, _), (after, first) = (timed(backend, room) for backend in (launched, captured))
        assert captured.runner.prompts.graphs.works, HELP
        print(f"| {room.num_tokens} | {room.least_rows} | {before:.2f} | {after:.2f} | {first:.1f} |", flush=True)


def compare(launched: TorchBackend, captured: TorchBackend, room: Room, dtype: str) -> None:
    """Prompts that fill the room, each in two chunks with states kept between, greedy and drawn."""
    for params in (GREEDY, DRAWN, SamplingParams(temperature=0.0, logprobs=5)):
        found, expected = (RoomPrompts(backend, room, params).run() for backend in (captured, launched))
        graphs = captured.runner.prompts.graphs
        assert graphs is not None and graphs.works, HELP
        if dtype == "float32":
            assert found.tokens == expected.tokens, f"{room}: captured {found.tokens}, launched {expected.tokens}"
        for slot, lines in found.logprobs.items():
            for mine, theirs in zip(lines, expected.logprobs[slot]):
                worst = max(abs(a - b) for a, b in zip(mine.top_logprobs, theirs.top_logprobs))
                assert worst < NEAR[dtype], f"{room}, slot {slot}: log probabilities differ by {worst:.1e}"
                if mine.top_ids[0] != theirs.top_ids[0]:
                    break  # two different texts from here on
    for backend in (launched, captured):
        backend.runner.pools.arena.check_integrity()
        assert backend.runner.pools.arena.used_bytes == 0


class RoomPrompts(Requests):
    """As many rows as the room is for, of different lengths."""

    def __init__(self, backend: TorchBackend, room: Room, params: SamplingParams) -> None:
        super().__init__(backend, room.least_rows)
        each = room.num_tokens // room.least_rows
        rng = np.random.default_rng(room.num_tokens)
        vocab = backend.spec.vocab_size
        # The second chunk has as many tokens as the room; the first one any.
        lengths = {slot: max(1, each - slot + 1) for slot in self.slots}
        self.prompts = {s: rng.integers(10, vocab, n + 70).astype(np.int32) for s, n in lengths.items()}
        self.params = params

    def run(self) -> RoomPrompts:
        first = [PrefillRow(s, 0, p[:70], captures=True, checkpoints=(64, 70)) for s, p in self.prompts.items()]
        admit = tuple(Admit(s, self.params, (), p, seed=s) for s, p in self.prompts.items())
        self.take(self.launch(admit=admit, prefill=tuple(first)))
        self.take(self.launch(prefill=self.second()))
        for step in range(3):
            self.take(self.launch(decode=tuple(DecodeRow(s, len(p) + step) for s, p in self.prompts.items())))
        self.end()
        return self

    def second(self) -> tuple[PrefillRow, ...]:
        return tuple(PrefillRow(s, 70, p[70:], samples=True, captures=True, checkpoints=(len(p),)) for s, p in self.prompts.items())


def timed(backend: TorchBackend, room: Room) -> tuple[float, float]:
    """Median milliseconds from launch to result, and seconds of the first time."""
    times = []
    for turn in range(6):
        prompts = RoomPrompts(backend, room, GREEDY)
        admit = tuple(Admit(s, GREEDY, (), p, seed=s) for s, p in prompts.prompts.items())
        rows = tuple(PrefillRow(s, 0, p[70:], samples=True) for s, p in prompts.prompts.items())
        torch.cuda.synchronize()
        began = time.perf_counter()
        prompts.take(prompts.launch(admit=admit, prefill=rows))
        times.append(time.perf_counter() - began)
        prompts.end()
    return statistics.median(times[1:]) * 1e3, times[0]
