"""What the scheduler relies on, of every backend: a new one joins by adding a line to `BACKENDS`.

Plans are written by hand here. Expected tokens come from the same backend running one sequence
alone, in one chunk, waiting for every step: whatever else a plan does must not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from damage import damage
from near_ties import count_same
from pippin.backends.base import (
    Admit,
    Backend,
    Capture,
    DecodeRow,
    Load,
    PendingStep,
    PrefillRow,
    Restore,
    Retire,
    Spill,
    StepPlan,
    StepResult,
)
from pippin.backends.fake import FakeBackend
from pippin.backends.masks import allow_only, full_masks
from pippin.backends.mlx.backend import MLXBackend
from pippin.types import Component, Payload, SamplingParams, TokenLogprobs
from processes import is_installed
from serving import served

NUM_SLOTS = 6
KV = (Component.ATTENTION, Component.WINDOW)
BACKENDS: dict[str, Callable[[], Backend]] = {
    "fake": lambda: FakeBackend(num_slots=NUM_SLOTS),
    "fake, by reference": lambda: FakeBackend(num_slots=NUM_SLOTS, restores_by_reference=True),
    "mlx": lambda: MLXBackend(
        served("qwen3_5"), num_slots=NUM_SLOTS, fingerprints=True, debug=True
    ),
}
if is_installed("torch"):
    from torch_serving import make_torch_backend

    BACKENDS["torch"] = partial(make_torch_backend, "qwen3_5", num_slots=NUM_SLOTS)
every_backend = pytest.mark.parametrize("make_backend", BACKENDS.values(), ids=BACKENDS.keys())
MakeBackend = Callable[[], Backend]


def make_tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 90, length).astype(np.int32)


def admit(
    slot: int,
    prompt: np.ndarray,
    seed: int = 0,
    *,
    stop_ids: tuple[int, ...] = (),
    reply: Sequence[int] = (),
    **params: Any,
) -> Admit:
    sampling = SamplingParams(**({"temperature": 0.0} | params))
    return Admit(slot, sampling, stop_ids, prompt, seed, np.array(reply, dtype=np.int32))


class Steps:
    """Numbers plans and hands them to a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._num_launched = 0

    def launch(self, **fields: Any) -> PendingStep:
        step, self._num_launched = self._num_launched, self._num_launched + 1
        return self.backend.launch(StepPlan(step, **fields))

    def run(self, **fields: Any) -> StepResult:
        return self.launch(**fields).wait()

    def start(self, slot: int, prompt: np.ndarray, seed: int = 0, **params: Any) -> int:
        """Admit and prefill in one chunk; returns the first token."""
        row = PrefillRow(slot, 0, prompt, samples=True)
        result = self.run(admit=(admit(slot, prompt, seed, **params),), prefill=(row,))
        return result.tokens[slot][0]

    def generate(self, slot: int, prompt: np.ndarray, num_tokens: int, **params: Any) -> list[int]:
        first = self.start(slot, prompt, **params)
        rows = [DecodeRow(slot, len(prompt) + n) for n in range(num_tokens - 1)]
        return [first, *(self.run(decode=(row,)).tokens[slot][0] for row in rows)]


@dataclass
class Expected:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, result: StepResult) -> None:
        self.tokens.append(result.tokens[1][0])
        self.logprobs.append(result.logprobs[1][0])


def alone(make_backend: MakeBackend, prompt: np.ndarray, num_tokens: int, **kw: Any) -> Expected:
    steps, expected = Steps(make_backend()), Expected()
    chunk = prefill(1, prompt, 0, len(prompt))
    expected.take(steps.run(admit=(admit(1, prompt, logprobs=2, **kw),), prefill=(chunk,)))
    for position in range(len(prompt), len(prompt) + num_tokens - 1):
        expected.take(steps.run(decode=(DecodeRow(1, position),)))
    return expected


def assert_says(tokens: Sequence[int], expected: Expected) -> None:
    assert count_same(tokens, expected) > 0


def restore(captures: Iterable[Capture], length: int) -> Restore:
    """What the tree would lend of these captures: KV in token order, the state at `length`."""
    payloads: dict[Component, tuple[Payload, ...]] = {}
    for capture in sorted(captures, key=lambda capture: capture.start):
        for component, payload in capture.kv.items():
            payloads[component] = (*payloads.get(component, ()), payload)
        if length in capture.states:
            payloads[Component.STATE] = (capture.states[length],)
        if capture.hidden is not None and capture.end == length:
            payloads[Component.HIDDEN] = (capture.hidden,)
    return Restore(length, payloads)


def prefill(slot: int, prompt: np.ndarray, start: int, end: int, **kwargs: Any) -> PrefillRow:
    return PrefillRow(slot, start, prompt[start:end], samples=end == len(prompt), **kwargs)


@every_backend
def test_a_prompt_in_chunks_equals_a_prompt_in_one(make_backend: MakeBackend) -> None:
    prompt = make_tokens(66)
    steps = Steps(make_backend())
    steps.run(admit=(admit(2, prompt),), prefill=(prefill(2, prompt, 0, 1),))
    steps.run(prefill=(prefill(2, prompt, 1, 65),))
    first = steps.run(prefill=(prefill(2, prompt, 65, 66),))
    second = steps.run(decode=(DecodeRow(2, 66),))
    assert_says([first.tokens[2][0], second.tokens[2][0]], alone(make_backend, prompt, 2))


@every_backend
def test_only_rows_that_sample_give_tokens(make_backend: MakeBackend) -> None:
    prompt = make_tokens(8)
    steps = Steps(make_backend())
    assert steps.run(admit=(admit(1, prompt),), prefill=(prefill(1, prompt, 0, 4),)).tokens == {}
    assert set(steps.run(prefill=(prefill(1, prompt, 4, 8),)).tokens) == {1}
    assert steps.run(decode=(DecodeRow(1, 8, samples=False),)).tokens == {}


@every_backend
def test_several_prompts_and_decodes_share_a_step(make_backend: MakeBackend) -> None:
    prompts = {slot: make_tokens(5 + 7 * slot, slot) for slot in (1, 2, 3, 4)}
    steps = Steps(make_backend())
    tokens = {1: [steps.start(1, prompts[1])]}
    result = steps.run(
        admit=tuple(admit(slot, prompts[slot]) for slot in (4, 2, 3)),
        prefill=tuple(prefill(s, prompts[s], 0, len(prompts[s])) for s in (4, 2, 3)),
        decode=(DecodeRow(1, len(prompts[1])),),
    )
    assert set(result.tokens) == {1, 2, 3, 4}
    tokens[1].append(result.tokens[1][0])
    tokens |= {slot: [result.tokens[slot][0]] for slot in (2, 3, 4)}
    rows = [DecodeRow(s, len(prompts[s]) + len(tokens[s]) - 1) for s in (3, 1, 4, 2)]
    result = steps.run(decode=tuple(rows))
    for slot in (1, 2, 3, 4):
        tokens[slot].append(result.tokens[slot][0])
        assert_says(tokens[slot], alone(make_backend, prompts[slot], len(tokens[slot])))


@every_backend
def test_a_slot_is_retired_before_the_same_plan_admits_it_again(make_backend: MakeBackend) -> None:
    old, new = make_tokens(9, 1), make_tokens(7, 2)
    steps = Steps(make_backend())
    steps.generate(3, old, 3)
    result = steps.run(
        retire=(Retire(3),), admit=(admit(3, new),), prefill=(prefill(3, new, 0, 7),)
    )
    after = steps.run(decode=(DecodeRow(3, 7),))
    assert_says([result.tokens[3][0], after.tokens[3][0]], alone(make_backend, new, 2))


@every_backend
def test_a_slot_may_be_retired_at_any_point_of_its_life(make_backend: MakeBackend) -> None:
    prompt, other = make_tokens(9, 1), make_tokens(12, 2)
    steps = Steps(make_backend())
    steps.run(admit=(admit(1, prompt),), prefill=(prefill(1, prompt, 0, 4),))
    first = steps.start(2, other)
    steps.run(retire=(Retire(1),))
    steps.start(3, prompt)
    result = steps.run(retire=(Retire(3),), decode=(DecodeRow(2, 12),))
    assert_says([first, result.tokens[2][0]], alone(make_backend, other, 2))


@every_backend
def test_a_slot_that_is_not_in_the_plan_keeps_what_it_holds(make_backend: MakeBackend) -> None:
    """Park and resume: others decode, join and leave in the meantime."""
    prompt, busy, late = make_tokens(9, 1), make_tokens(5, 2), make_tokens(6, 3)
    steps = Steps(make_backend())
    tokens = steps.generate(1, prompt, 3)
    steps.start(2, busy)
    for position in range(5, 8):
        steps.run(decode=(DecodeRow(2, position),))
    steps.run(admit=(admit(3, late),), prefill=(prefill(3, late, 0, 6),), decode=(DecodeRow(2, 8),))
    steps.run(retire=(Retire(2),), decode=(DecodeRow(3, 6),))
    for position in range(11, 13):
        tokens.append(steps.run(decode=(DecodeRow(1, position),)).tokens[1][0])
    assert_says(tokens, alone(make_backend, prompt, 5))


@every_backend
def test_a_restored_prefix_equals_a_computed_one(make_backend: MakeBackend) -> None:
    prompt = make_tokens(80)
    steps = Steps(make_backend())
    captured = steps.run(
        admit=(admit(1, prompt),),
        prefill=(prefill(1, prompt, 0, 64, captures=True, checkpoints=(64,)),),
    ).captures
    steps.run(prefill=(prefill(1, prompt, 64, 80),))
    branch = np.concatenate([prompt[:64], make_tokens(9, 5)])
    row = prefill(2, branch, 64, 73, restore=restore(captured, 64))
    tokens = [steps.run(admit=(admit(2, branch),), prefill=(row,)).tokens[2][0]]
    tokens.append(steps.run(decode=(DecodeRow(2, 73), DecodeRow(1, 80))).tokens[2][0])
    assert_says(tokens, alone(make_backend, branch, 2))


@every_backend
def test_captures_say_what_they_cover(make_backend: MakeBackend) -> None:
    prompt = make_tokens(70)
    backend = make_backend()
    steps = Steps(backend)
    row = prefill(1, prompt, 0, 64, captures=True, checkpoints=(64,))
    (capture,) = steps.run(admit=(admit(1, prompt),), prefill=(row,)).captures
    assert (capture.slot, capture.start, capture.end, capture.retired) == (1, 0, 64, False)
    kv_components = [c for c in backend.spec.components if c in KV]
    assert set(capture.kv) == set(kv_components)
    assert all(payload.num_tokens == 64 for payload in capture.kv.values())
    assert set(capture.states) == {64}
    assert capture.nbytes == sum(p.nbytes for p in [*capture.kv.values(), capture.states[64]])
    head, tail = capture.kv[kv_components[0]].split(24)
    assert (head.num_tokens, tail.num_tokens) == (24, 40)


def through_bytes(backend: Backend, steps: Steps, whole: Restore, **fields: Any) -> Restore:
    """Spill what a restore needs, and load it again: other payloads, of the same bytes."""
    spill = tuple(Spill(component, payloads) for component, payloads in whole.payloads.items())
    spilled = steps.run(spill=spill, **fields).spilled
    loads = []
    for part, found in zip(spill, spilled, strict=True):
        num_tokens = sum(payload.num_tokens for payload in part.payloads)
        arrays = tuple(array.copy() for array in found.arrays())
        specs = backend.payload_arrays(part.component, num_tokens)
        assert [array.nbytes for array in arrays] == [spec.nbytes for spec in specs]
        loads.append(Load(part.component, num_tokens, arrays))
        found.release()
    plan = StepPlan(0, load=tuple(loads))
    loaded = steps.run(load=plan.load).loaded
    assert sum(payload.nbytes for payload in loaded) <= backend.transient_bytes(plan)
    for payloads, again in zip(whole.payloads.values(), loaded, strict=True):
        assert [again.fingerprint()] == [p.fingerprint() for p in payloads] or len(payloads) > 1
    return Restore(whole.length, {s.component: (p,) for s, p in zip(spill, loaded, strict=True)})


@every_backend
def test_what_was_spilled_and_loaded_restores_as_what_was_captured(
    make_backend: MakeBackend,
) -> None:
    """Several payloads become one, and a step that decodes can do both beside it."""
    prompt, other = make_tokens(70), make_tokens(20, 4)
    backend = make_backend()
    steps = Steps(backend)
    steps.start(3, other)
    row = prefill(1, prompt, 0, 70, captures=True, checkpoints=(70,))
    captured = steps.run(admit=(admit(1, prompt),), prefill=(row,)).captures
    whole = restore(captured, 70)
    kv = {c: payloads[0].split(24) for c, payloads in whole.payloads.items() if c in KV}
    whole = Restore(70, {**whole.payloads, **kv})
    again = through_bytes(backend, steps, whole, decode=(DecodeRow(3, 20),))
    for payloads in whole.payloads.values():
        for payload in payloads:
            payload.release()
    longer = np.concatenate([prompt, make_tokens(7, 8)])
    row = prefill(2, longer, 70, 77, restore=again)
    tokens = [steps.run(admit=(admit(2, longer),), prefill=(row,)).tokens[2][0]]
    tokens.append(steps.run(decode=(DecodeRow(2, 77),)).tokens[2][0])
    assert_says(tokens, alone(make_backend, longer, 2))


@every_backend
def test_a_discarded_step_gives_up_what_it_spilled_and_loaded(make_backend: MakeBackend) -> None:
    prompt = make_tokens(70)
    backend = make_backend()
    steps = Steps(backend)
    row = prefill(1, prompt, 0, 64, captures=True, checkpoints=(64,))
    captured = steps.run(admit=(admit(1, prompt),), prefill=(row,)).captures
    whole = restore(captured, 64)
    again = through_bytes(backend, steps, whole)
    (component, payloads), *_ = again.payloads.items()
    steps.launch(spill=(Spill(component, payloads),)).discard()
    tokens = [steps.run(prefill=(prefill(1, prompt, 64, 70),)).tokens[1][0]]
    assert_says(tokens, alone(make_backend, prompt, 1))


def captured_prompt(steps: Steps, prompt: np.ndarray) -> Restore:
    """All of it, its KV in two payloads, of which the second begins inside of a block."""
    row = prefill(1, prompt, 0, len(prompt), captures=True, checkpoints=(len(prompt),))
    captured = steps.run(admit=(admit(1, prompt),), prefill=(row,)).captures
    whole = restore(captured, len(prompt))
    kv = {c: payloads[0].split(24) for c, payloads in whole.payloads.items() if c in KV}
    steps.run(retire=(Retire(1),))
    return Restore(len(prompt), {**whole.payloads, **kv})


@every_backend
def test_what_has_changed_in_memory_is_told_before_anything_is_computed_from_it(
    make_backend: MakeBackend,
) -> None:
    backend = make_backend()
    prompt = make_tokens(70)
    longer = np.concatenate([prompt, make_tokens(7, 8)])
    for component in (None, *backend.spec.components):
        steps = Steps(make_backend())
        held = captured_prompt(steps, prompt)
        if component is not None:
            damage(held.payloads[component][0])
        row = prefill(2, longer, 70, 77, restore=held)
        result = steps.run(admit=(admit(2, longer),), prefill=(row,))
        told = {(found.slot, found.component) for found in result.damaged}
        if component is not Component.HIDDEN:  # the others do without it
            assert told == ({(2, component)} if component is not None else set())
        if component in KV:
            assert any(found.start == 0 and found.end >= 24 for found in result.damaged)
        whole = prefill(3, prompt, 70, 70, restore=held)
        first = steps.run(admit=(admit(3, prompt),), prefill=(whole,)).damaged
        assert component is not Component.HIDDEN or first
        second = steps.run(decode=(DecodeRow(3, 70),)).damaged
        told = {(found.slot, found.component) for found in (*first, *second)}
        assert told == ({(3, component)} if component is not None else set())


@every_backend
def test_what_has_changed_in_memory_is_not_taken_for_sound_when_it_is_spilled(
    make_backend: MakeBackend,
) -> None:
    backend = make_backend()
    steps = Steps(backend)
    held = captured_prompt(steps, make_tokens(70))
    spill = tuple(Spill(component, payloads) for component, payloads in held.payloads.items())
    for damaged in (None, *held.payloads):
        if damaged is not None:
            damage(held.payloads[damaged][0])
        spilled = steps.run(spill=spill).spilled
        intact = {s.component: found.intact for s, found in zip(spill, spilled, strict=True)}
        assert intact == {component: component is not damaged for component in held.payloads}
        for found in spilled:
            found.release()
        if damaged is not None:
            damage(held.payloads[damaged][0])  # and back


@every_backend
def test_what_was_loaded_is_compared_like_what_was_captured(make_backend: MakeBackend) -> None:
    backend = make_backend()
    steps = Steps(backend)
    prompt = make_tokens(70)
    again = through_bytes(backend, steps, captured_prompt(steps, prompt))
    state = Component.STATE if Component.STATE in again.payloads else Component.ATTENTION
    damage(again.payloads[state][0])
    longer = np.concatenate([prompt, make_tokens(7, 8)])
    row = prefill(2, longer, 70, 77, restore=again)
    result = steps.run(admit=(admit(2, longer),), prefill=(row,))
    assert {found.component for found in result.damaged} == {state}


def restored_whole(slot: int, prompt: np.ndarray, captures: Iterable[Capture], **kw: Any) -> Any:
    return prefill(
        slot, prompt, len(prompt), len(prompt), restore=restore(captures, len(prompt)), **kw
    )


@every_backend
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 0.8}]
)
def test_a_prompt_that_is_restored_whole_is_sampled_without_its_tokens(
    make_backend: MakeBackend, params: dict[str, Any]
) -> None:
    prompt, other = make_tokens(70), make_tokens(40, 3)
    backend = make_backend()
    steps = Steps(backend)
    rows = [
        prefill(slot, tokens, 0, len(tokens), captures=True, checkpoints=(len(tokens),))
        for slot, tokens in ((1, prompt), (2, other))
    ]
    captures = steps.run(admit=(admit(1, prompt), admit(2, other)), prefill=tuple(rows)).captures
    assert [c.hidden is not None and c.hidden.nbytes for c in captures] == [
        backend.spec.hidden_bytes
    ] * 2
    mine, others = ([c for c in captures if c.slot == slot] for slot in (1, 2))
    result = steps.run(
        admit=(admit(3, prompt, logprobs=2, **params), admit(4, other)),
        prefill=(restored_whole(3, prompt, mine), restored_whole(4, other, others)),
        decode=(DecodeRow(1, 70),),
    )
    tokens = [result.tokens[3][0]]
    assert len(result.logprobs[3][0].top_ids) == 2
    tokens.append(steps.run(decode=(DecodeRow(4, 40), DecodeRow(3, 70))).tokens[3][0])
    assert_says(tokens, alone(make_backend, prompt, 2, **params))
    assert_says([result.tokens[4][0]], alone(make_backend, other, 1))


@every_backend
def test_a_prompt_that_is_restored_whole_waits_for_its_mask(make_backend: MakeBackend) -> None:
    prompt = make_tokens(9)
    steps = Steps(make_backend())
    row = prefill(1, prompt, 0, 9, captures=True, checkpoints=(9,))
    captures = steps.run(admit=(admit(1, prompt),), prefill=(row,)).captures
    pending = steps.launch(
        admit=(admit(2, prompt),), prefill=(restored_whole(2, prompt, captures, masked=True),)
    )
    only = full_masks(1, steps.backend.spec.vocab_size)
    allow_only(only[0], 11)
    pending.sample(only)
    assert pending.wait().tokens == {2: (11,)}
    after = steps.run(decode=(DecodeRow(2, 9),))
    forced = np.append(prompt, np.int32(11))
    assert_says([after.tokens[2][0]], alone(make_backend, forced, 1))


@every_backend
def test_a_retired_slot_hands_over_prompt_and_reply(make_backend: MakeBackend) -> None:
    """The last token of the reply is absorbed first; then the next turn computes only itself."""
    prompt = make_tokens(20)
    steps = Steps(make_backend())
    reply = steps.generate(1, prompt, 4)
    steps.run(decode=(DecodeRow(1, 23, samples=False),))
    captures = steps.run(retire=(Retire(1, 0, 24, captures=True),)).captures
    assert all(capture.retired for capture in captures)
    assert max(capture.end for capture in captures) == 24
    turn = np.concatenate([prompt, np.array(reply, dtype=np.int32), make_tokens(3, 9)])
    row = prefill(4, turn, 24, 27, restore=restore(captures, 24))
    result = steps.run(admit=(admit(4, turn),), prefill=(row,))
    assert_says([result.tokens[4][0]], alone(make_backend, turn, 1))


@every_backend
def test_a_checkpoint_of_a_reply_serves_as_a_state(make_backend: MakeBackend) -> None:
    prompt = make_tokens(20)
    steps = Steps(make_backend())
    reply = steps.generate(1, prompt, 2)
    step = steps.run(decode=(DecodeRow(1, 21, checkpoint=True),))
    (checkpoint,) = step.captures
    assert (checkpoint.start, checkpoint.end, set(checkpoint.states)) == (21, 22, {22})
    assert not checkpoint.kv
    steps.run(decode=(DecodeRow(1, 22),))  # goes on: the checkpoint must not
    captures = steps.run(retire=(Retire(1, 0, 23, captures=True),)).captures
    lent: dict[Component, tuple[Payload, ...]] = {Component.STATE: (checkpoint.states[22],)}
    for component, payloads in restore(captures, 23).payloads.items():
        if component in KV:
            lent[component] = payloads[-1].split(22)[:1]
    turn = np.concatenate([prompt, np.array(reply, dtype=np.int32), make_tokens(3, 9)])
    result = steps.run(
        admit=(admit(2, turn),), prefill=(prefill(2, turn, 22, 25, restore=Restore(22, lent)),)
    )
    assert_says([result.tokens[2][0]], alone(make_backend, turn, 1))


@every_backend
def test_steps_launched_ahead_equal_steps_waited_for(make_backend: MakeBackend) -> None:
    """`launch` needs no result of an earlier step: five go out before the first is looked at."""
    prompts = {1: make_tokens(9, 1), 2: make_tokens(17, 2)}
    steps = Steps(make_backend())
    launched = [
        steps.launch(
            admit=tuple(admit(slot, prompt) for slot, prompt in prompts.items()),
            prefill=tuple(prefill(s, p, 0, len(p)) for s, p in prompts.items()),
        )
    ]
    for ahead in range(4):
        rows = tuple(DecodeRow(slot, len(prompt) + ahead) for slot, prompt in prompts.items())
        launched.append(steps.launch(decode=rows))
    results = [pending.wait() for pending in launched]
    for slot, prompt in prompts.items():
        assert_says([r.tokens[slot][0] for r in results], alone(make_backend, prompt, 5))


@every_backend
def test_wait_never_waits_for_a_later_step(make_backend: MakeBackend) -> None:
    """The later step cannot finish: its one row is sampled only when its mask comes."""
    prompt = make_tokens(9)
    steps = Steps(make_backend())
    first = steps.launch(admit=(admit(1, prompt),), prefill=(prefill(1, prompt, 0, 9),))
    second = steps.launch(decode=(DecodeRow(1, 9, masked=True),))
    tokens = [first.wait().tokens[1][0]]
    second.sample(full_masks(1, steps.backend.spec.vocab_size))
    tokens.append(second.wait().tokens[1][0])
    assert_says(tokens, alone(make_backend, prompt, 2))


@every_backend
def test_an_empty_plan_is_a_step_like_any_other(make_backend: MakeBackend) -> None:
    steps = Steps(make_backend())
    result = steps.run()
    assert (dict(result.tokens), result.captures) == ({}, ())
    prompt = make_tokens(5)
    assert_says(steps.generate(1, prompt, 2), alone(make_backend, prompt, 2))


@every_backend
def test_masked_rows_are_sampled_once_among_what_is_allowed(make_backend: MakeBackend) -> None:
    grammar, plain = make_tokens(9, 1), make_tokens(9, 2)
    steps = Steps(make_backend())
    pending = steps.launch(
        admit=(admit(1, grammar), admit(2, plain)),
        prefill=(prefill(1, grammar, 0, 9, masked=True), prefill(2, plain, 0, 9)),
    )
    only = full_masks(1, steps.backend.spec.vocab_size)
    allow_only(only[0], 11)
    pending.sample(only)
    with pytest.raises(AssertionError):
        pending.sample(only)
    first = pending.wait()
    assert first.tokens[1][0] == 11
    assert_says([first.tokens[2][0]], alone(make_backend, plain, 1))
    second = steps.run(decode=(DecodeRow(1, 9), DecodeRow(2, 9)))
    forced = np.append(grammar, np.int32(11))
    assert_says([second.tokens[1][0]], alone(make_backend, forced, 1))


@every_backend
def test_masks_go_to_their_rows_whoever_is_in_the_batch(make_backend: MakeBackend) -> None:
    """All rows but one obey, and then all of them, in a batch that has room for more."""
    steps = Steps(make_backend())
    for slot in (1, 2, 3):
        steps.start(slot, make_tokens(9, slot))
    for position, masked in ((9, (3, 1)), (10, (1, 2, 3))):
        rows = [DecodeRow(slot, position, masked=slot in masked) for slot in (2, 3, 1)]
        pending = steps.launch(decode=tuple(rows))
        order = [row.slot for row in rows if row.masked]
        masks = full_masks(len(order), steps.backend.spec.vocab_size)
        for mask, slot in zip(masks, order, strict=True):
            allow_only(mask, 20 + slot)
        pending.sample(masks)
        tokens = pending.wait().tokens
        assert {slot: tokens[slot] for slot in masked} == {slot: (20 + slot,) for slot in masked}


@every_backend
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    ],
    ids=["greedy", "sampled", "penalised"],
)
def test_a_slot_that_decodes_runs_known_tokens_at_once_and_goes_on(
    make_backend: MakeBackend, params: dict[str, Any]
) -> None:
    """What it says next is what a request says that is resumed with all of that as its reply."""
    prompt, other = make_tokens(9, 1), make_tokens(9, 2)
    steps = Steps(make_backend())
    reply = steps.generate(1, prompt, 3, **params)
    others = steps.generate(2, other, 2)
    known = [reply[-1], *make_tokens(6, 3).tolist(), 20, 20, 20]
    chunk = PrefillRow(1, 11, np.array(known, dtype=np.int32), samples=True, masked=True)
    pending = steps.launch(prefill=(chunk,), decode=(DecodeRow(2, 10),))
    pending.sample(full_masks(1, steps.backend.spec.vocab_size))
    result = pending.wait()
    said, others = [result.tokens[1][0]], [*others, result.tokens[2][0]]
    for number in range(3):
        rows = (DecodeRow(1, 21 + number), DecodeRow(2, 11 + number))
        result = steps.run(decode=rows)
        said, others = [*said, result.tokens[1][0]], [*others, result.tokens[2][0]]
    resumed, expected = Steps(make_backend()), Expected()
    whole = np.array([*prompt, *reply[:-1], *known], dtype=np.int32)
    admitted = admit(1, prompt, logprobs=2, reply=[*reply[:-1], *known], **params)
    row = PrefillRow(1, 0, whole, samples=True)
    expected.take(resumed.run(admit=(admitted,), prefill=(row,)))
    for position in range(len(whole), len(whole) + 3):
        expected.take(resumed.run(decode=(DecodeRow(1, position),)))
    assert_says(said, expected)
    assert_says(others, alone(make_backend, other, 6))


@every_backend
def test_a_seed_gives_the_same_tokens_in_any_slot_and_any_company(
    make_backend: MakeBackend,
) -> None:
    prompt = make_tokens(9)
    sampled = {"temperature": 1.0, "seed": 5}
    expected = alone(make_backend, prompt, 3, **sampled)
    steps = Steps(make_backend())
    steps.start(1, make_tokens(4, 8), seed=9, temperature=1.0)
    tokens = [steps.start(5, prompt, **sampled)]
    for position in (9, 10):
        rows = (DecodeRow(1, position - 5), DecodeRow(5, position))
        tokens.append(steps.run(decode=rows).tokens[5][0])
    assert_says(tokens, expected)


# Penalties below zero make a reply repeat itself, so that each token hangs on those before it.
RESUMED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 0.9, "presence_penalty": -2.0, "frequency_penalty": -1.5},
    "sampled": {
        "temperature": 3.0,
        "seed": 7,
        "frequency_penalty": -1.0,
        "min_tokens": 8,
        "stop_ids": tuple(range(1, 90, 2)),
    },
}


@every_backend
@pytest.mark.parametrize("params", RESUMED.values(), ids=RESUMED.keys())
def test_a_resumed_request_goes_on_as_if_it_had_never_been_preempted(
    make_backend: MakeBackend, params: dict[str, Any]
) -> None:
    prompt = make_tokens(20)
    steps = Steps(make_backend())
    reply = steps.generate(1, prompt, 5, **params)
    known = np.concatenate([prompt, np.array(reply, dtype=np.int32)])
    resumed = admit(3, prompt, reply=reply, **params)
    steps.run(retire=(Retire(1),), admit=(resumed,), prefill=(prefill(3, known, 0, 22),))
    tokens = [steps.run(prefill=(prefill(3, known, 22, 25),)).tokens[3][0]]
    tokens += [steps.run(decode=(DecodeRow(3, at),)).tokens[3][0] for at in range(25, 31)]
    assert_says([*reply, *tokens], alone(make_backend, prompt, 12, **params))


@every_backend
def test_logprobs_come_to_those_who_ask(make_backend: MakeBackend) -> None:
    asking, other = make_tokens(9, 1), make_tokens(9, 2)
    steps = Steps(make_backend())
    result = steps.run(
        admit=(admit(1, asking, logprobs=3), admit(2, other)),
        prefill=(prefill(1, asking, 0, 9), prefill(2, other, 0, 9)),
    )
    assert set(result.logprobs) == {1}
    assert len(result.logprobs[1][0].top_ids) == 3
    result = steps.run(decode=(DecodeRow(2, 9), DecodeRow(1, 9)))
    assert set(result.logprobs) == {1}
    assert result.logprobs[1][0].top_ids[0] == result.tokens[1][0]


@every_backend
def test_a_prompts_scores_come_with_its_first_token(make_backend: MakeBackend) -> None:
    asking, one, other = make_tokens(9, 1), make_tokens(1, 2), make_tokens(9, 3)
    steps = Steps(make_backend())
    result = steps.run(
        admit=(admit(1, asking, prompt_logprobs=2), admit(2, one, prompt_logprobs=0)),
        prefill=(prefill(1, asking, 0, 4), prefill(2, one, 0, 1)),
    )
    assert {slot: len(scores) for slot, scores in result.prompt_logprobs.items()} == {2: 0}
    result = steps.run(
        admit=(admit(3, other),), prefill=(prefill(1, asking, 4, 9), prefill(3, other, 0, 9))
    )
    assert set(result.prompt_logprobs) == {1}
    scores = result.prompt_logprobs[1]
    assert len(scores) == 8  # nothing comes before the first token
    for token, score in zip(asking[1:].tolist(), scores, strict=True):
        assert len(score.top_ids) == len(score.top_logprobs) == 2
        if token in score.top_ids:
            assert score.top_logprobs[score.top_ids.index(token)] == score.logprob
        assert score.logprob <= max(score.top_logprobs)
    assert steps.run(decode=(DecodeRow(1, 9),)).prompt_logprobs == {}


@every_backend
def test_hidden_vectors_come_to_those_who_ask_computed_or_restored(
    make_backend: MakeBackend,
) -> None:
    steps, prompt = Steps(make_backend()), make_tokens(40)
    asks = [replace(admit(slot, prompt), embeds=slot != 2) for slot in (1, 2, 3)]
    rows = [prefill(slot, prompt, 0, 40, captures=slot == 1) for slot in (1, 2)]
    first = prefill(3, prompt, 0, 16)
    result = steps.run(admit=tuple(asks), prefill=(*rows, first))
    assert result.hidden.keys() == {1}
    assert result.hidden[1].dtype == np.float32
    rest = steps.run(prefill=(prefill(3, prompt, 16, 40),))
    np.testing.assert_allclose(rest.hidden[3], result.hidden[1], rtol=1e-3, atol=1e-3)

    kept = restore(result.captures, 40)
    whole = PrefillRow(4, 40, prompt[40:], samples=True, restore=kept)
    again = steps.run(admit=(replace(admit(4, prompt), embeds=True),), prefill=(whole,))
    np.testing.assert_array_equal(again.hidden[4], result.hidden[1])
    assert not steps.run(decode=(DecodeRow(1, 40),)).hidden


@every_backend
def test_a_spec_names_what_the_cache_must_keep(make_backend: MakeBackend) -> None:
    spec = make_backend().spec
    assert spec.vocab_size > 90
    assert spec.components
    for layer in spec.layers:
        assert layer.nbytes > 0
        assert (layer.window is not None) == (layer.component is Component.WINDOW)


@every_backend
def test_a_discarded_step_gives_its_captures_up_and_leaves_its_rows_alone(
    make_backend: MakeBackend,
) -> None:
    prompt = make_tokens(70)
    steps = Steps(make_backend())
    row = prefill(1, prompt, 0, 64, captures=True, checkpoints=(64,))
    steps.launch(admit=(admit(1, prompt),), prefill=(row,)).discard()
    tokens = [steps.run(prefill=(prefill(1, prompt, 64, 70),)).tokens[1][0]]
    tokens.append(steps.run(decode=(DecodeRow(1, 70),)).tokens[1][0])
    assert_says(tokens, alone(make_backend, prompt, 2))


@every_backend
def test_a_row_costs_more_the_longer_it_is(make_backend: MakeBackend) -> None:
    backend = make_backend()
    spec = backend.spec
    costs = [backend.row_bytes(num_tokens) for num_tokens in range(1, 1000)]
    assert costs == sorted(costs)
    assert costs[-1] >= 999 * spec.kv_bytes_per_token + spec.state_bytes
    assert backend.row_bytes(999, 500) <= costs[-1]


@every_backend
def test_a_step_captures_no_more_than_was_told(make_backend: MakeBackend) -> None:
    backend = make_backend()
    steps = Steps(backend)
    prompt, other = make_tokens(200, 1), make_tokens(70, 2)
    plans: list[dict[str, Any]] = [
        {
            "admit": (admit(1, prompt), admit(2, other)),
            "prefill": (
                prefill(1, prompt, 0, 192, captures=True, checkpoints=(64, 128, 192)),
                prefill(2, other, 0, 64, captures=True, checkpoints=(64,)),
            ),
        },
        {"prefill": (prefill(1, prompt, 192, 200, captures=True), prefill(2, other, 64, 70))},
        {"decode": (DecodeRow(1, 200, checkpoint=True), DecodeRow(2, 70))},
        {"retire": (Retire(1, 100, 201, captures=True), Retire(2, 0, 71, captures=True))},
    ]
    for number, fields in enumerate(plans):
        told = backend.transient_bytes(StepPlan(number, **fields))
        assert told == sum(
            backend.transient_bytes(StepPlan(number, **{kind: (row,)}))
            for kind, rows in fields.items()
            for row in rows
        )
        captured = sum(capture.nbytes for capture in steps.run(**fields).captures)
        assert 0 < captured <= told


@every_backend
def test_a_backend_says_what_it_computes_on(make_backend: MakeBackend) -> None:
    device = make_backend().device
    assert device.name
    assert 0.0 < device.share <= 1.0
    assert device.prefill_tokens >= 1
    assert device.memory_bytes > 0


@every_backend
@pytest.mark.slow
def test_many_steps_cross_every_internal_boundary(make_backend: MakeBackend) -> None:
    """Past the length of a decode tail, with two steps in flight and a join on the way."""
    prompt, late = make_tokens(60, 1), make_tokens(30, 2)
    steps = Steps(make_backend())
    tokens = {1: [steps.start(1, prompt)], 2: []}
    pending: list[PendingStep] = []
    for ahead in range(70):
        rows = [DecodeRow(1, 60 + ahead)]
        if ahead == 20:
            joins = {"admit": (admit(2, late),), "prefill": (prefill(2, late, 0, 30),)}
        else:
            joins = {}
        if ahead > 20:
            rows.append(DecodeRow(2, 30 + ahead - 21))
        pending.append(steps.launch(decode=tuple(rows), **joins))
    results = [step.wait() for step in pending]
    assert [len(result.tokens) for result in results] == [1] * 20 + [2] * 50
    for result in results:
        for slot, sampled in result.tokens.items():
            tokens[slot] += sampled
    assert_says(tokens[1], alone(make_backend, prompt, 71))
    assert_says(tokens[2], alone(make_backend, late, 50))
