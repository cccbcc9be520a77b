"""What running requests hold is never more than was told before, whoever comes and goes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from families import CONFIGS, VOCAB, build_from
from kv_layouts import kv_layout
from pippin.backends.base import (
    Admit,
    DecodeRow,
    PendingStep,
    PrefillRow,
    Proposal,
    Restore,
    Retire,
    StepPlan,
)
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.load import LoadedModel, prepare
from pippin.backends.mlx.payloads import packing
from pippin.backends.mlx.rows.memory import Footprint, SpareLimit
from pippin.types import Component, SamplingParams
from serving import served

pytestmark = pytest.mark.slow

# A hybrid with little to compute and much to keep: its tokens and its states take more room than
# those of the bundled model.
HYBRID = "hybrid"
CONFIG = {
    "model_type": "qwen3_5",
    "text_config": CONFIGS["qwen3_5"]["text_config"]
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "linear_num_value_heads": 12,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 128,
    },
}
MODELS = (HYBRID, "gpt_oss", "llama")  # a hybrid, one with windows, one with neither
NUM_SLOTS = 12
MAX_LEN = 1500
# Logits and activations of the two decode steps of these small models that are in flight: all of
# their arrays are there at once where they are submitted ahead (cpu/operations.py).
STEP_BYTES = 12 << 20


@cache
def model(name: str) -> LoadedModel:
    return prepare(build_from(CONFIG), CONFIG) if name == HYBRID else served(name)


@pytest.fixture(autouse=True)
def limits_restored() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


def draw(num_tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB, num_tokens).astype(np.int32)


class Crowd:
    """Requests that come and go at random, two steps in flight, each told what it may hold."""

    def __init__(self, name: str, seed: int, depth: int = 0) -> None:
        """`depth`: of drafts, which are all wrong."""
        self.backend = MLXBackend(model(name), num_slots=NUM_SLOTS, max_depth=depth)
        assert self.backend.max_depth == depth
        gc.collect()
        mx.synchronize()
        self.before = mx.get_active_memory()
        self.rng = np.random.default_rng(seed)
        self.prompts: dict[int, np.ndarray] = {}
        self.held: dict[int, int] = {}
        self.in_flight: list[PendingStep] = []
        self.number = 0

    def limit(self, spare_bytes: int) -> None:
        self.backend._decodes.shared_rows.spare.max_bytes = spare_bytes

    @property
    def told(self) -> int:
        return sum(self.backend.row_bytes(n) for n in self.held.values())

    def launch(self, **parts: tuple[object, ...]) -> None:
        plan = StepPlan(self.number, **parts)  # type: ignore[arg-type]
        self.number += 1
        self.in_flight.append(self.backend.launch(plan))
        if len(self.in_flight) > 1:
            self.in_flight.pop(0).wait()

    def come(self, *lens: int) -> None:
        """Several prompts together, so that they share forwards."""
        free = [slot for slot in range(1, NUM_SLOTS + 1) if slot not in self.held]
        coming = dict(zip(free, lens, strict=False))
        for slot, n in coming.items():
            self.prompts[slot] = draw(n, seed=slot)
            self.held[slot] = n
        sampling = SamplingParams(temperature=0.0)
        self.launch(admit=tuple(Admit(s, sampling, (), self.prompts[s], 0) for s in coming))
        for start in range(0, max(coming.values()), 256):
            chunks = [
                PrefillRow(s, start, self.prompts[s][start : start + 256], start + 256 >= n)
                for s, n in coming.items()
                if start < n
            ]
            self.launch(prefill=tuple(chunks))

    def go(self, slot: int) -> None:
        self.launch(retire=(Retire(slot),))
        del self.held[slot]

    def say(self, num_tokens: int) -> None:
        depth = self.backend.max_depth
        wrong = np.full(2 * depth + 2, -1, dtype=np.int32)
        for _ in range(num_tokens):
            rows = [
                DecodeRow(slot, length, depth=depth, proposal=Proposal(length, wrong))
                for slot, length in self.held.items()
            ]
            self.launch(decode=tuple(rows))
            for slot in self.held:
                self.held[slot] += 1

    def drained_bytes(self) -> int:
        """Bytes that rows hold when nothing is on its way."""
        while self.in_flight:
            self.in_flight.pop(0).wait()
        mx.synchronize()
        return int(mx.get_active_memory()) - self.before


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("depth", [0, 4])
def test_rows_hold_no_more_than_was_told(name: str, depth: int) -> None:
    crowd = Crowd(name, 1, depth)
    spare = 2 << 20
    crowd.limit(spare)
    rng = crowd.rng
    crowd.come(1200, 40, 700, 650)
    assert crowd.drained_bytes() <= crowd.told
    for _ in range(14):
        if len(crowd.held) > 3 and rng.random() < 0.5:
            crowd.go(int(rng.choice(list(crowd.held))))
        elif len(crowd.held) < NUM_SLOTS - 3:
            crowd.come(*rng.integers(1, 900, rng.integers(1, 3)).tolist())
        crowd.drained_bytes()
        mx.reset_peak_memory()
        crowd.say(int(rng.integers(1, 20)))
        while max(crowd.held.values()) > MAX_LEN:
            crowd.go(max(crowd.held, key=lambda slot: crowd.held[slot]))
        assert crowd.drained_bytes() <= crowd.told + spare
        assert mx.get_peak_memory() - crowd.before <= crowd.told + spare + STEP_BYTES


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_keeps_nothing_of_those_it_was_computed_with(name: str) -> None:
    crowd = Crowd(name, seed=3)
    crowd.come(*range(200, 240, 5))
    for slot in list(crowd.held)[1:]:
        crowd.go(slot)
    assert crowd.drained_bytes() <= crowd.told


def test_a_restored_prefix_is_within_what_its_row_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy and the joined keys of its first chunk are not there together, but for a part."""
    monkeypatch.setattr(packing, "LONG_PREFIX_BYTES", 0)
    config = CONFIGS["llama"] | {"num_hidden_layers": 16}
    backend = MLXBackend(prepare(build_from(config), config), num_slots=1)
    prompt = draw(1540, seed=1)
    admit = Admit(1, SamplingParams(temperature=0.0), (), prompt, 0)
    chunk = PrefillRow(1, 0, prompt[:1536], captures=True)
    captures = backend.launch(StepPlan(0, admit=(admit,), prefill=(chunk,))).wait().captures
    backend.launch(StepPlan(1, retire=(Retire(1),))).wait()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    lent = {Component.ATTENTION: tuple(c.kv[Component.ATTENTION] for c in captures)}
    chunk = PrefillRow(1, 1536, prompt[1536:], restore=Restore(1536, lent))
    backend.launch(StepPlan(2, admit=(admit,), prefill=(chunk,))).wait()
    mx.synchronize()
    assert mx.get_peak_memory() - before <= backend.row_bytes(1540)


def test_rows_get_just_the_lines_they_need_where_a_bucket_would_be_too_much() -> None:
    footprint = Footprint(kv_layout([None] * 2, 2, (64, 64)))
    ample = SpareLimit(footprint)
    tight = SpareLimit(footprint, max_bytes=8 * footprint.line_bytes)
    assert [ample.width_for(n) for n in (1, 5, 9, 17, 300)] == [1, 6, 12, 24, 320]
    assert [tight.width_for(n) for n in (1, 5, 9, 17, 300)] == [1, 6, 9, 17, 300]


def test_the_budget_is_for_weights_rows_tree_and_all_else() -> None:
    backend = MLXBackend(served("llama"), num_slots=2)
    used = backend.memory_used()
    capacity = backend.limit_memory(used + (100 << 20))
    # mlx's spare buffers are a part of the whole budget, whatever else this process holds.
    assert 0.5 * (100 << 20) < capacity < 0.9 * (100 << 20)
    assert backend.limit_memory(used // 2) < 0
