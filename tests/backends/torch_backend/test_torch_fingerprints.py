"""Fingerprints that a step launches together: each payload is given the sums of its own words."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from damage import damage
from pippin.backends.base import (
    Admit,
    Capture,
    Damage,
    PrefillRow,
    Restore,
    Retire,
    Spill,
    StepPlan,
    StepResult,
)
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.pools import fingerprints
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.types import Component, Payload, SamplingParams
from torch_serving import load_torch

GREEDY = SamplingParams(temperature=0.0)
PARTS_OF_A_STATE = 3  # at least


def sum_words(runs: torch.Tensor) -> torch.Tensor:
    """As the kernel does it."""
    words = [(ctypes.c_int32 * num).from_address(start) for start, num in runs.T.tolist()]
    return torch.tensor([int(np.frombuffer(each, np.int32).sum()) for each in words])


class Steps:
    """Runs plans on a small hybrid."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, by_kernel: bool) -> None:
        model = load_torch("qwen3_5")
        self.backend = TorchBackend(model, num_slots=4, kernels=False, fingerprints=True)
        slab_words = self.backend.runner.pools.layout.slab_bytes // 4
        monkeypatch.setattr(fingerprints, "MOST_OF_A_STATE", slab_words // PARTS_OF_A_STATE)
        runner = self.backend.runner
        self.sums = fingerprints.WordSums(
            runner.pools, self.backend._streams, sum_words if by_kernel else None
        )
        runner.fingerprints = fingerprints.TorchFingerprints(self.sums)
        self.last = 0

    def plan(self, **what: object) -> StepPlan:
        self.last += 1
        return StepPlan(self.last, **what)  # type: ignore[arg-type]

    def run(self, **what: object) -> StepResult:
        return self.backend.launch(self.plan(**what)).wait()

    def capture(self, lengths: Iterable[int]) -> list[Capture]:
        """Of prompts in slots 1, 2, ..., which are free afterwards."""
        prompts = {slot: prompt_of(slot, n) for slot, n in enumerate(lengths, start=1)}
        admit = tuple(Admit(slot, GREEDY, (), prompt, seed=1) for slot, prompt in prompts.items())
        rows = tuple(
            PrefillRow(
                slot,
                0,
                prompt,
                samples=True,
                captures=True,
                checkpoints=(*range(64, len(prompt), 64), len(prompt)),
            )
            for slot, prompt in prompts.items()
        )
        result = self.run(admit=admit, prefill=rows)
        self.run(retire=tuple(Retire(slot) for slot in prompts))
        return list(result.captures)

    def spill(self, *payloads: Payload) -> list[bool]:
        """Which are what they were."""
        spills = tuple(Spill(component_of(payload), (payload,)) for payload in payloads)
        return [spilled.intact for spilled in self.run(spill=spills).spilled]

    def restore_plan(self, capture: Capture, kv: tuple[Payload, ...]) -> StepPlan:
        """Into slot 1: the prompt that it was captured of, and some more."""
        prompt = prompt_of(capture.slot, capture.end)
        longer = np.concatenate([prompt, prompt_of(9, 5)])
        state = (capture.states[capture.end],)
        held = Restore(capture.end, {Component.ATTENTION: kv, Component.STATE: state})
        row = PrefillRow(
            1, capture.end, longer[capture.end :], samples=True, captures=True, restore=held
        )
        return self.plan(admit=(Admit(1, GREEDY, (), longer, seed=1),), prefill=(row,))


@pytest.fixture(params=[False, True], ids=["plain", "kernel"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    made = Steps(monkeypatch, by_kernel=request.param)
    yield made
    made.backend.close()


def prompt_of(number: int, length: int) -> np.ndarray:
    return np.arange(10 * number, 10 * number + length, dtype=np.int32)


def component_of(payload: Payload) -> Component:
    if isinstance(payload, KVPayload):
        return payload.kind
    return Component.STATE if isinstance(payload, StatePayload) else Component.HIDDEN


def words_of(steps: Steps, payload: Payload) -> list[int]:
    pools = steps.backend.runner.pools
    if isinstance(payload, HiddenPayload):
        assert payload.hidden is not None
        lines = payload.hidden.view(1, -1)
    elif isinstance(payload, StatePayload):
        parts = len(steps.sums._state_parts)
        assert parts >= PARTS_OF_A_STATE
        lines = pools.state_bytes(payload.slab).view(parts, -1)
    else:
        assert isinstance(payload, KVPayload)
        lines = pools.cell_bytes(payload.kind, payload.cells)
    return lines.contiguous().view(torch.int32).sum(dim=1).tolist()


@pytest.mark.parametrize("lengths", [(65,), (64, 131, 7)], ids=str)
def test_every_payload_has_the_sums_of_its_words(steps: Steps, lengths: tuple[int, ...]) -> None:
    made = [payload for capture in steps.capture(lengths) for payload in capture.payloads]
    assert len(made) == 3 * len(lengths) + sum((n - 1) // 64 for n in lengths)
    assert steps.spill(made[0]) == [True]
    for payload in made:
        assert isinstance(payload, KVPayload | StatePayload | HiddenPayload)
        assert payload.prints.known is not None
        assert payload.prints.known.tolist() == words_of(steps, payload)


def test_what_has_changed_is_reported_alone_and_once(steps: Steps) -> None:
    """Whatever was captured before or after it, and wherever it was split meanwhile."""
    first, second = [steps.capture([n])[0] for n in (70, 90)]
    parts = second.kv[Component.ATTENTION].split(30)
    kv = (parts[0], *parts[1].split(25))
    damage(kv[1])
    expected = (Damage(1, Component.ATTENTION, 30, 55),)
    assert steps.backend.launch(steps.restore_plan(second, kv)).wait().damaged == expected
    assert steps.run(retire=(Retire(1),)).damaged == ()
    sound = steps.restore_plan(first, (first.kv[Component.ATTENTION],))
    assert steps.backend.launch(sound).wait().damaged == ()
    steps.run(retire=(Retire(1),))
    damage(first.states[70])
    others = [payload for payload in (*first.payloads, kv[0]) if payload is not first.states[70]]
    assert steps.spill(first.states[70], *others) == [False, *[True] * len(others)]


def test_a_step_that_compares_keeps_what_it_makes_itself(steps: Steps) -> None:
    (first,) = steps.capture([70])
    plan = steps.restore_plan(first, (first.kv[Component.ATTENTION],))
    (second,) = steps.backend.launch(plan).wait().captures
    made = second.kv[Component.ATTENTION]
    assert isinstance(made, KVPayload)
    steps.run(retire=(Retire(1),))
    assert made.prints.known is not None
    assert made.prints.known.tolist() == words_of(steps, made)
    assert steps.spill(*second.payloads) == [True] * len(second.payloads)
    damage(made)
    assert steps.spill(made) == [False]


def test_what_was_moved_meanwhile_is_sound(steps: Steps) -> None:
    """Fingerprints belong to payloads, not to cells."""
    pool = steps.backend.runner.pools.arena.cells[Component.ATTENTION]
    captures = [steps.capture([90])[0] for _ in range(4)]
    for capture in captures[1:3]:
        for payload in capture.payloads:
            payload.release()
    kept = [capture.kv[Component.ATTENTION] for capture in (captures[0], captures[3])]
    before = [payload.cells.tolist() for payload in kept if isinstance(payload, KVPayload)]
    with torch.inference_mode():
        pool.empty_a_slab()
    assert before != [payload.cells.tolist() for payload in kept if isinstance(payload, KVPayload)]
    assert steps.spill(*kept) == [True, True]
    damage(kept[1])
    assert steps.spill(*kept) == [True, False]


def test_a_discarded_step_takes_no_sums_of_earlier_ones_with_it(steps: Steps) -> None:
    (capture,) = steps.capture([70])
    state = capture.states[70]
    damage(state)
    discarded = steps.backend.launch(steps.plan(spill=(Spill(Component.STATE, (state,)),)))
    discarded.discard()
    assert steps.run().damaged == ()
    assert steps.spill(state) == [False]
