"""Drafts, of every backend that verifies some: the same tokens as without, whatever is proposed.

Plans are written by hand, as in `test_contract.py`. A `Reply` proposes what is known to come next,
with errors, and keeps its bounds as a scheduler does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import pytest

from cases import cases
from near_ties import count_same
from pippin.backends.base import (
    Backend,
    Capture,
    DecodeRow,
    PrefillRow,
    Proposal,
    Restore,
    Retire,
    StepResult,
)
from pippin.backends.fake import FakeBackend
from pippin.types import Component, Payload
from processes import is_installed
from serving import BUNDLED, DRAFTED_BY, make_backend
from test_contract import Expected, Steps, admit, alone, make_tokens, prefill, restore

NUM_SLOTS = 6
MAX_DEPTH = 4
NUM_TOKENS = 40  # of an expected reply
LENGTHS = ((5, 20), (20, 64))  # of prompts at random: of greedy replies, and of sampled ones
MakeBackend = Callable[..., Backend]
OWN_DRAFTS = f"qwen3{DRAFTED_BY}qwen3"
MLX_OWN_DRAFTS = f"mlx, llama{DRAFTED_BY}llama"


def make_fake(max_depth: int = MAX_DEPTH) -> Backend:
    return FakeBackend(num_slots=NUM_SLOTS, max_depth=max_depth)


def make_mlx(name: str, max_depth: int = MAX_DEPTH) -> Backend:
    backend: Backend = make_backend(name, NUM_SLOTS, max_depth=max_depth)
    return backend


BACKENDS: dict[str, MakeBackend] = {"fake": make_fake} | {
    f"mlx, {name}": partial(make_mlx, name) for name in ("qwen3_5", "llama", "gpt_oss")
}
BACKENDS |= {
    name: partial(make_mlx, name.removeprefix("mlx, "))
    for name in (f"mlx, {BUNDLED}", MLX_OWN_DRAFTS)
}
DRAFTING_THEMSELVES = ("fake", f"mlx, {BUNDLED}", MLX_OWN_DRAFTS)
if is_installed("torch"):
    from torch_serving import make_torch_backend

    def make_torch(name: str) -> MakeBackend:
        mtp = name == BUNDLED or name.endswith("_mtp")
        served_name, _, draft = name.partition(DRAFTED_BY)

        def make(max_depth: int = MAX_DEPTH) -> Backend:
            return make_torch_backend(
                served_name,
                num_slots=NUM_SLOTS,
                max_depth=max_depth,
                mtp=mtp,
                draft=draft or None,
            )

        return make

    BACKENDS |= {
        f"torch, {name}": make_torch(name)
        for name in ("qwen3", "llama_windows", "qwen3_5", "qwen3_next_mtp", BUNDLED, OWN_DRAFTS)
    }
    DRAFTING_THEMSELVES = (*DRAFTING_THEMSELVES, f"torch, {BUNDLED}", f"torch, {OWN_DRAFTS}")
# Experts add nothing to drafts that a dense model does not: they run at random alone.
# So does the model whose own head drafts, beyond its own tests.
every_backend = pytest.mark.parametrize(
    "name",
    [
        name
        for name in BACKENDS
        if name != "torch, qwen3_next_mtp" and BUNDLED not in name and DRAFTED_BY not in name
    ],
)
drafting_itself = pytest.mark.parametrize("name", DRAFTING_THEMSELVES)
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "top_p": {"temperature": 0.8, "top_p": 0.9, "seed": 1 << 63},
}
every_way = pytest.mark.parametrize("params", SAMPLED.values(), ids=SAMPLED.keys())


@cache
def _expected(name: str, length: int, seed: int, params: tuple[tuple[str, Any], ...]) -> Expected:
    make_backend = BACKENDS[name]
    kwargs = {key: value for key, value in params if key != "logprobs"}
    return alone(lambda: make_backend(0), make_tokens(length, seed), NUM_TOKENS, **kwargs)


@dataclass
class Reply:
    """A request that runs in a slot, and what it says when it runs alone, a token a step."""

    name: str
    slot: int
    length: int = 20
    number: int = 0  # of its prompt
    params: dict[str, Any] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    bound: int = 0  # tokens that the row holds at most
    depths: list[int] = field(default_factory=list)  # of the steps in flight
    num_left: int = 0  # drafts, by the backend's own drafter

    def __post_init__(self) -> None:
        self.expected = _expected(self.name, self.length, self.number, tuple(self.params.items()))
        self.prompt = make_tokens(self.length, self.number)
        self.bound = self.length

    @property
    def num_known(self) -> int:
        return self.length + len(self.tokens)

    @property
    def is_near_end(self) -> bool:
        """Of what is known of it beforehand."""
        return self.bound > self.length + NUM_TOKENS - 3 * (1 + MAX_DEPTH)

    @property
    def known(self) -> np.ndarray:
        """Prompt and reply."""
        return np.concatenate([self.prompt, np.array(self.tokens, dtype=np.int32)])

    def start(self, **kwargs: Any) -> dict[str, Any]:
        """Parts of a plan that admit it and run its prompt."""
        chunk = PrefillRow(self.slot, 0, self.prompt, samples=True, **kwargs)
        who = admit(self.slot, self.prompt, stop_ids=self.stop_ids, **self.params)
        self.depths.append(0)
        self.num_left = chunk.num_drafts
        return {"admit": (who,), "prefill": (chunk,)}

    def row(self, depth: int = 0, wrong: Iterable[int] = (), **kwargs: Any) -> DecodeRow:
        """Drafts of the reply's tokens as they will be, but at places that are `wrong`."""
        proposal = None
        if depth:
            last = self.bound + 1 + depth - self.length
            tokens = np.array(self.expected.tokens[len(self.tokens) : last], dtype=np.int32)
            for place in wrong:
                if 0 <= (at := place - len(self.tokens)) < len(tokens):
                    tokens[at] = 3 + (tokens[at] + 1) % 80
            proposal = Proposal(self.num_known, tokens)
        row = DecodeRow(self.slot, self.bound, depth=depth, proposal=proposal, **kwargs)
        self.bound += 1 + depth
        self.depths.append(depth)
        return row

    def own_row(self, num_drafts: int = 0, most: int = MAX_DEPTH, **kwargs: Any) -> DecodeRow:
        """Drafts that the backend left; as many are to be left again."""
        depth = min(self.num_left, most)
        row = DecodeRow(self.slot, self.bound, depth=depth, num_drafts=num_drafts, **kwargs)
        self.bound += 1 + depth
        self.depths.append(depth)
        self.num_left = num_drafts
        return row

    def settle(self, result: StepResult) -> int:
        """Returns how many drafts were accepted."""
        found = result.tokens[self.slot]
        self.tokens += found
        self.bound -= self.depths.pop(0) - (len(found) - 1)
        return len(found) - 1

    def check(self) -> None:
        expected = Expected(
            self.expected.tokens[: len(self.tokens)], self.expected.logprobs[: len(self.tokens)]
        )
        assert count_same(self.tokens, expected) > 0


def started(steps: Steps, *replies: Reply) -> None:
    for reply in replies:
        reply.settle(steps.run(**reply.start()))


# ---- what is accepted ----------------------------------------------------------------------------


@every_backend
@every_way
@pytest.mark.parametrize("depth", [1, 2, MAX_DEPTH])
def test_right_drafts_are_accepted(name: str, params: dict[str, Any], depth: int) -> None:
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 2, params=params)
    started(steps, reply)
    for _ in range(4):
        assert reply.settle(steps.run(decode=(reply.row(depth),))) == depth
    reply.settle(steps.run(decode=(reply.row(),)))
    reply.check()


@every_backend
@every_way
@pytest.mark.parametrize("wrong", range(1, 5))
def test_none_is_accepted_behind_a_wrong_draft(
    name: str, params: dict[str, Any], wrong: int
) -> None:
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 2, params=params)
    started(steps, reply)
    assert reply.settle(steps.run(decode=(reply.row(MAX_DEPTH, [wrong]),))) == wrong - 1
    assert reply.settle(steps.run(decode=(reply.row(2),))) == 2
    assert reply.settle(steps.run(decode=(reply.row(3, range(NUM_TOKENS)),))) == 0
    for _ in range(3):
        reply.settle(steps.run(decode=(reply.row(),)))
    reply.check()


@every_backend
@pytest.mark.parametrize("place", [1, 2, 3])
def test_no_draft_is_accepted_behind_a_stop_id(name: str, place: int) -> None:
    """The first of eight or the last: all of them count."""
    token = Reply(name, 1).expected.tokens[place]
    for stop_ids in ((token, *range(200, 207)), (*range(200, 207), token)):
        steps, reply = Steps(BACKENDS[name]()), Reply(name, 1, stop_ids=stop_ids)
        started(steps, reply)
        first = reply.expected.tokens.index(token)
        if first == 0:
            continue  # it was said before
        assert reply.settle(steps.run(decode=(reply.row(MAX_DEPTH),))) == first - 1
        assert reply.tokens[-1] == token


@every_backend
def test_a_proposal_may_end_before_a_rows_drafts_do(name: str) -> None:
    """The step before accepted more than the host expected to be known: there is no draft."""
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 3)
    started(steps, reply)
    first = steps.launch(decode=(reply.row(2),))
    row = reply.row(3)
    assert row.proposal is not None
    short = Proposal(row.proposal.start, row.proposal.tokens[:4])
    short_row = DecodeRow(row.slot, row.position, depth=3, proposal=short)
    second = steps.launch(decode=(short_row,))
    assert reply.settle(first.wait()) == 2
    assert reply.settle(second.wait()) == 1
    for _ in range(3):
        reply.settle(steps.run(decode=(reply.row(),)))
    reply.check()


@every_backend
@every_way
def test_steps_with_drafts_are_launched_ahead(name: str, params: dict[str, Any]) -> None:
    """Each is planned before it is known what the one before accepts."""
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 4, params=params)
    started(steps, reply)
    ahead = steps.launch(decode=(reply.row(3, [3, 9]),))
    for depth in (2, 0, 4, 0, 0, 1, 3):
        following = steps.launch(decode=(reply.row(depth, [3, 9, 14, 15]),))
        reply.settle(ahead.wait())
        ahead = following
    reply.settle(ahead.wait())
    assert len(reply.tokens) > 9
    reply.check()


# ---- drafts of the backend's own -----------------------------------------------------------------


@drafting_itself
@every_way
def test_a_backend_drafts_itself(name: str, params: dict[str, Any]) -> None:
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 2, params=params)
    assert steps.backend.drafts_itself == MAX_DEPTH
    reply.settle(steps.run(**reply.start(num_drafts=2)))
    accepted = 0
    for num_drafts in (4, 1, 0, 3, 2, 2) * 3:
        if not reply.is_near_end:
            accepted += reply.settle(steps.run(decode=(reply.own_row(num_drafts),)))
    reply.check()
    assert accepted > 0


@drafting_itself
def test_drafts_are_left_by_steps_in_flight(name: str) -> None:
    """What a step accepts is not known when the one is planned that verifies its drafts."""
    steps = Steps(BACKENDS[name]())
    replies = [
        Reply(name, slot, 9 * slot, slot, {"temperature": 1.0, "seed": slot} if slot % 2 else {})
        for slot in range(1, 4)
    ]
    for reply in replies:
        reply.settle(steps.run(**reply.start(num_drafts=reply.slot)))
    ahead = steps.launch(decode=tuple(reply.own_row(3) for reply in replies))
    accepted = 0
    for turn in range(5):
        rows = [reply.own_row((reply.slot + turn) % 5, most=2) for reply in replies]
        following = steps.launch(decode=tuple(rows))
        result, ahead = ahead.wait(), following
        accepted += sum(reply.settle(result) for reply in replies)
    result = ahead.wait()
    for reply in replies:
        reply.settle(result)
        reply.check()
    assert accepted > 0


@drafting_itself
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_a_preempted_reply_goes_on_with_drafts(name: str, way: str) -> None:
    """From what its row captured behind accepted drafts, in another slot, and twice."""
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 2, params=SAMPLED[way])
    reply.settle(steps.run(**reply.start(num_drafts=2)))
    for slot in (3, 1):
        for num_drafts in (3, 3, 0, 2, 2):
            reply.settle(steps.run(decode=(reply.own_row(num_drafts),)))
        end, known = reply.bound, reply.known
        captures = steps.run(retire=(Retire(reply.slot, 0, end, captures=True),)).captures
        who = admit(slot, reply.prompt, reply=known[reply.length :].tolist(), **reply.params)
        options = {"restore": restore(captures, end), "num_drafts": 2, "samples": True}
        row = PrefillRow(slot, end, known[end:], **options)
        reply.depths.append(0)
        reply.slot, reply.bound, reply.num_left = slot, len(known), 2
        reply.settle(steps.run(admit=(who,), prefill=(row,)))
    reply.check()


# ---- in company ----------------------------------------------------------------------------------


@every_backend
def test_rows_of_every_depth_share_a_step(name: str) -> None:
    steps = Steps(BACKENDS[name]())
    replies = [
        Reply(
            name, slot, 7 + 9 * slot, slot, {"temperature": 1.0, "seed": slot} if slot % 2 else {}
        )
        for slot in range(1, 6)
    ]
    started(steps, *replies)
    for turn in range(4):
        rows = [reply.row((reply.slot + turn) % 5, [3, 8]) for reply in replies]
        result = steps.run(decode=tuple(rows))
        for reply in replies:
            reply.settle(result)
    for reply in replies:
        reply.check()


@every_backend
def test_rows_that_cannot_speculate_run_beside_those_that_do(name: str) -> None:
    """Penalties, log probabilities and a prompt beside drafts: each gets what it gets alone."""
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 1)
    scored = Reply(name, 2, number=2, params={"logprobs": 2, "presence_penalty": 0.5})
    late = Reply(name, 3, 30, 3)
    started(steps, reply, scored)
    result = steps.run(decode=(reply.row(3, [2]), scored.row()), **late.start())
    assert len(result.logprobs[2]) == 1
    for each in (reply, scored, late):
        each.settle(result)
    result = steps.run(decode=(late.row(4), reply.row(), scored.row()))
    for each in (reply, scored, late):
        each.settle(result)
        each.check()


# ---- what is kept --------------------------------------------------------------------------------


def lent(captures: Iterable[Capture], state: Payload | None, length: int) -> Restore:
    """KV of captures up to a length, with a state from elsewhere."""
    payloads: dict[Component, tuple[Payload, ...]] = {}
    for component, found in restore(captures, -1).payloads.items():
        total = sum(payload.num_tokens for payload in found)
        end = max(capture.end for capture in captures)
        parts, at = [], end - total
        for payload in found:
            if at + payload.num_tokens <= length:
                parts.append(payload)
            elif at < length:
                parts.append(payload.split(length - at)[0])
            at += payload.num_tokens
        payloads[component] = tuple(parts)
    if state is not None:
        payloads[Component.STATE] = (state,)
    return Restore(length, payloads)


def goes_on(steps: Steps, reply: Reply, prefix: Restore) -> None:
    """Another request with the same text, restored there, says what the first would say."""
    known = reply.known
    rest = known[prefix.length :]
    who = admit(6, reply.prompt, reply=known[reply.length :].tolist(), **reply.params)
    row = prefill(6, known, prefix.length, len(known), restore=prefix)
    assert len(rest) > 0
    result = steps.run(admit=(who,), prefill=(row,))
    found = [*reply.tokens, result.tokens[6][0]]
    found.append(steps.run(decode=(DecodeRow(6, len(known)),)).tokens[6][0])
    Reply(reply.name, 6, reply.length, reply.number, reply.params, tokens=found).check()
    steps.run(retire=(Retire(6),))


@every_backend
@every_way
@pytest.mark.parametrize("num_dropped", [0, 1, 3])
def test_a_row_retires_before_drafts_that_it_accepted(
    name: str, params: dict[str, Any], num_dropped: int
) -> None:
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 2, params=params)
    started(steps, reply)
    reply.settle(steps.run(decode=(reply.row(2),)))
    assert reply.settle(steps.run(decode=(reply.row(3),))) == 3
    end = reply.bound - num_dropped
    captures = steps.run(retire=(Retire(2, 0, end, captures=True),)).captures
    goes_on(steps, reply, restore(captures, end))


@every_backend
def test_a_row_retires_after_drafts_that_it_rejected(name: str) -> None:
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 2, 60)
    started(steps, reply)
    reply.settle(steps.run(decode=(reply.row(2),)))
    assert reply.settle(steps.run(decode=(reply.row(4, [5]),))) == 1
    captures = steps.run(retire=(Retire(2, 0, reply.bound, captures=True),)).captures
    goes_on(steps, reply, restore(captures, reply.bound))


@every_backend
@pytest.mark.parametrize("depth", [0, 2])
def test_a_checkpoint_is_the_state_behind_the_input_token(name: str, depth: int) -> None:
    """Where that is, the result says; and drafts that are accepted behind it change nothing."""
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 2)
    started(steps, reply)
    first = steps.launch(decode=(reply.row(3, [2]),))
    second = steps.launch(decode=(reply.row(depth, checkpoint=True),))
    assert reply.settle(first.wait()) == 1
    result = second.wait()
    reply.settle(result)
    keeps = Component.STATE in steps.backend.spec.components
    assert [(c.start, c.end, [*c.states]) for c in result.captures] == [(22, 23, [23])] * keeps
    state = result.captures[0].states[23] if keeps else None
    reply.settle(steps.run(decode=(reply.row(1),)))
    captures = steps.run(retire=(Retire(2, 0, reply.bound, captures=True),)).captures
    goes_on(steps, reply, lent(captures, state, 23))


@every_backend
def test_a_discarded_step_gives_its_checkpoints_up(name: str) -> None:
    steps, reply = Steps(BACKENDS[name]()), Reply(name, 2)
    started(steps, reply)
    used = steps.backend.memory_used()
    steps.launch(decode=(reply.row(2, checkpoint=True),)).discard()
    steps.run(retire=(Retire(2),))
    steps.start(3, make_tokens(4))  # comes after the step that was discarded, which may still run
    steps.run(retire=(Retire(3),))
    assert steps.backend.memory_used() < used


# ---- at random -----------------------------------------------------------------------------------


def _random_row(random: Random, backend: Backend, reply: Reply, errors: Sequence[int]) -> DecodeRow:
    checkpoint = random.random() < 0.2
    if backend.drafts_itself and random.random() < 0.8:
        num_drafts = random.choice((0, 1, 2, backend.drafts_itself))
        return reply.own_row(num_drafts, random.choice((0, 2, MAX_DEPTH)), checkpoint=checkpoint)
    reply.num_left = 0
    return reply.row(random.choice((0, 0, 1, 2, MAX_DEPTH)), errors, checkpoint=checkpoint)


# Larger sizes take ten times as long, and show no more.
@cases(
    ("name", "seed"),
    [
        (name, seed)
        for name in BACKENDS
        if name not in (f"torch, {BUNDLED}", MLX_OWN_DRAFTS)
        for seed in range(2 if BUNDLED in name else 4)
    ],
)
def test_random_schedules(name: str, seed: int) -> None:
    """A step in flight, depths and errors of every kind; rows rest, retire and start again from
    what others have left."""
    random = Random(seed)
    steps = Steps(BACKENDS[name]())
    running: dict[int, Reply] = {}
    inflight: list[tuple[Any, list[Reply]]] = []

    def settle() -> None:
        pending, owners = inflight.pop(0)
        result = pending.wait()
        for reply in owners:
            reply.settle(result)
        for capture in result.captures:
            capture.release()

    for _ in range(60):
        slot = random.randrange(1, 5)
        plan: dict[str, Any] = {"retire": (), "decode": ()}
        owners = []
        if slot not in running:
            params = {"temperature": 1.0, "seed": slot} if slot % 2 else {}
            length = random.choice(LENGTHS[slot % 2])
            reply = Reply(name, slot, length, number=slot, params=params)
            first = random.randrange(1 + steps.backend.drafts_itself)
            plan |= reply.start(num_drafts=first)
            owners.append(reply)
        elif running[slot].is_near_end:
            while inflight:
                settle()
            reply = running.pop(slot)
            reply.check()
            end = min(reply.bound, reply.num_known)
            plan["retire"] = (Retire(slot, 0, end, captures=True),)
        rows = [r for r in running.values() if random.random() < 0.8 and not r.is_near_end]
        errors = random.sample(range(NUM_TOKENS), random.choice((0, 5, 30)))
        plan["decode"] = tuple(_random_row(random, steps.backend, reply, errors) for reply in rows)
        running |= {reply.slot: reply for reply in owners}
        inflight.append((steps.launch(**plan), [*owners, *rows]))
        if len(inflight) > 1:
            settle()
    while inflight:
        settle()
    for reply in running.values():
        reply.check()
    assert sum(len(reply.tokens) for reply in running.values()) > 10
    used = steps.backend.memory_used()
    result = steps.run(retire=tuple(Retire(slot) for slot in running))
    assert not result.captures
    assert steps.backend.memory_used() < used
