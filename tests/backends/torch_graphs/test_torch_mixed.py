"""Decode rows beside chunks of prompts in one captured forward, through the whole backend: on a CPU
a stand-in runs again what it recorded, in plain operations that read the graphs' words.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from builders import AMPLE_BYTES
from chunk_words import capture_chunks, capture_mixed
from pippin.backends.base import Admit, Capture, DecodeRow, PrefillRow, Retire, StepPlan, StepResult
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.step.sizes import (
    MIXED_ROOMS,
    MIXED_WIDTHS,
    MixedSize,
    Room,
    mixed_size_for,
)
from pippin.types import SamplingParams
from run_again import RunAgain
from serving import TORCH, make_client, make_prompt
from torch_serving import load_torch

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
}
SAMPLER = {"temperature": 1.0, "frequency_penalty": 0.5}


def make_pair(name: str = "llama") -> tuple[TorchBackend, TorchBackend, RunAgain]:
    """One in plain operations, and one whose steps with decode rows and chunks are captured."""
    plain, captured = (
        TorchBackend(
            load_torch(name), num_slots=6, pool_bytes=AMPLE_BYTES, kernels=False, debug=True
        )
        for _ in range(2)
    )
    recorder = RunAgain()
    capture_chunks(captured, RunAgain())
    capture_mixed(captured, recorder)
    return plain, captured, recorder


def place_of(capture: Capture) -> tuple[int, int]:
    return capture.slot, capture.start


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(3, 90, length).astype(np.int32)


def play(backend: TorchBackend, params: dict[str, Any]) -> list[StepResult]:
    """Two replies go on while two prompts arrive, ahead of the results."""
    prompts = {slot: prompt_of(length) for slot, length in ((1, 5), (2, 70), (3, 150), (4, 64))}
    admits = tuple(
        Admit(slot, SamplingParams(**params), (), prompt, seed=slot)
        for slot, prompt in prompts.items()
    )
    _, _, c, d = prompts.values()
    begun = tuple(PrefillRow(s, 0, prompts[s], samples=True, captures=True) for s in (1, 2))
    first = PrefillRow(3, 0, c[:130], checkpoints=(64, 128, 130), captures=True)
    rest = PrefillRow(3, 130, c[130:], samples=True, checkpoints=(150,), captures=True)
    other = PrefillRow(4, 0, d, samples=True, checkpoints=(64,), captures=True)
    plans: list[dict[str, Any]] = [
        {"admit": admits, "prefill": begun},
        {"decode": (DecodeRow(1, 5), DecodeRow(2, 70, checkpoint=True)), "prefill": (first,)},
        {"decode": (DecodeRow(2, 71), DecodeRow(1, 6)), "prefill": (rest, other)},
        {"decode": tuple(DecodeRow(s, p) for s, p in ((1, 7), (2, 72), (3, 150), (4, 64)))},
    ]
    pending = [backend.launch(StepPlan(n, **plan)) for n, plan in enumerate(plans)]
    results = [step.wait() for step in pending]
    ends = tuple(Retire(slot) for slot in prompts)
    results.append(backend.launch(StepPlan(9, retire=ends)).wait())
    return results


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_what_both_say_in_one_forward_is_what_they_say_apart(
    name: str, params: dict[str, Any]
) -> None:
    plain, captured, recorder = make_pair(name)
    expected, found = play(plain, params), play(captured, params)
    assert [dict(result.tokens) for result in found] == [dict(r.tokens) for r in expected]
    assert recorder.num_replays == 2
    for mine, theirs in zip(found, expected, strict=True):
        assert not mine.overflowed
        assert mine.forwards == theirs.forwards
        pairs = zip(*(sorted(each.captures, key=place_of) for each in (mine, theirs)), strict=True)
        for a, b in pairs:
            assert (a.slot, a.start, a.end) == (b.slot, b.start, b.end)
            assert (a.hidden is None) == (b.hidden is None)
            assert a.states.keys() == b.states.keys()


def test_what_needs_the_sampler_runs_apart() -> None:
    plain, captured, recorder = make_pair()
    expected, found = play(plain, SAMPLER), play(captured, SAMPLER)
    assert [dict(result.tokens) for result in found] == [dict(r.tokens) for r in expected]
    assert recorder.num_replays == 0


def test_what_is_not_captured_while_requests_run_runs_apart() -> None:
    """Launched kernel by kernel, one forward of both would take longer than two replays."""
    plain, captured, recorder = make_pair()
    captured.make_way(busy=True)
    expected, found = play(plain, PARAMS["drawn"]), play(captured, PARAMS["drawn"])
    assert [dict(result.tokens) for result in found] == [dict(r.tokens) for r in expected]
    assert recorder.num_replays == 0
    assert captured.runner.mixed.steps is not None
    assert not captured.runner.mixed.steps.graphs


def test_sizes() -> None:
    assert mixed_size_for(1, 1, 1) == MixedSize(16, Room(64, 16))
    assert mixed_size_for(17, 513, 1) == MixedSize(32, Room(1024, 16))
    assert mixed_size_for(16, 65, 16) == MixedSize(16, Room(128, 16))
    assert mixed_size_for(256, 1024, 1) == MixedSize(256, Room(1024, 16))
    assert mixed_size_for(257, 1, 1) is None
    assert mixed_size_for(1, 1025, 1) is None
    assert mixed_size_for(1, 64, 17) is None


@pytest.mark.parametrize("num_slots", [2, 17, 64, 100, 256])
def test_they_are_warmed_up(num_slots: int) -> None:
    """All that so many slots can ask for."""
    ways = TorchBackend(load_torch("llama"), num_slots=2, kernels=False)._ways
    ways = replace(ways, kernels=True, chunk_graphs=True, mixed=True, num_slots=num_slots)
    shapes = [shape for shape in ways.shapes_to_warm_up() if shape.beside]
    assert all(shape.beside + shape.num_rows <= num_slots for shape in shapes)
    found = {mixed_size_for(s.beside, s.num_tokens, s.num_rows) for s in shapes}
    asked = {
        MixedSize(width, room)
        for room in MIXED_ROOMS
        for less, width in pairwise((0, *MIXED_WIDTHS))
        if less + 1 < num_slots
    }
    assert found == asked


@pytest.mark.parametrize("num_slots", [2, 16, 20, 64])
def test_the_largest_is_captured_first(num_slots: int) -> None:
    """Those that are warmed up later fit into its memory, however few rows there are."""
    backend = TorchBackend(load_torch("llama"), num_slots=num_slots, kernels=False)
    steps = capture_mixed(backend, RunAgain())
    with torch.inference_mode():
        backend.runner.capture_largest()
    ways = replace(backend._ways, kernels=True, chunk_graphs=True, mixed=True)
    shapes = [shape for shape in ways.shapes_to_warm_up() if shape.beside]
    sizes = [mixed_size_for(s.beside, s.num_tokens, s.num_rows) for s in shapes]
    largest = max((s for s in sizes if s is not None), key=lambda s: (s.width, s.room.num_tokens))
    assert {size for size, _ in steps.graphs} == {largest}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_replies_beside_prompts_are_what_they_are_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the scheduler, with prefixes that the tree holds and prompts that come while others
    are answered."""
    client = make_client(f"{TORCH}{name}", chunk=64, num_slots=6)
    plain = make_client(f"{TORCH}{name}", chunk=64, num_slots=6)
    recorder = RunAgain()
    backend = client.loop.backend
    capture_chunks(backend, RunAgain())  # type: ignore[arg-type]
    capture_mixed(backend, recorder)  # type: ignore[arg-type]
    monkeypatch.setattr(backend, "make_way", lambda *, busy: None)
    lengths = (3, 64, 150, 70, 90)
    prompts = [make_prompt(f"{TORCH}{name}", n, seed=n % 7) for n in lengths]
    prompts += [[*p, *prompts[0]] for p in prompts]
    found = []
    for each in (client, plain):
        replies = []
        for prompt in prompts:
            replies.append(each.submit(prompt, max_tokens=12, logprobs=None))
            for _ in range(3):
                each.loop.step()
        each.run()
        found.append(replies)
    assert recorder.num_replays > 5
    for reply, expected in zip(*found, strict=True):
        assert reply.tokens == expected.tokens
