"""Rows of mlx that verify drafts, beyond what every backend must do (`test_draft_contract.py`).

Through moves of tails into mains, and wherever a row's state may lack accepted drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from pippin.backends.base import (
    Backend,
    DecodeRow,
    PendingStep,
    PrefillRow,
    Proposal,
    Retire,
    StepResult,
)
from pippin.backends.mlx.backend import MLXBackend
from serving import served
from test_contract import NUM_SLOTS, Steps, make_tokens

MAX_DEPTH = 4
Make = Callable[..., Backend]


def make_mlx(name: str, max_depth: int = MAX_DEPTH) -> MLXBackend:
    backend = MLXBackend(
        served(name), num_slots=NUM_SLOTS, max_depth=max_depth, fingerprints=True, debug=True
    )
    assert backend.max_depth == max_depth
    return backend


# The hybrid, attention alone, and windows.
DRAFTING: dict[str, Make] = {
    name: partial(make_mlx, name) for name in ("qwen3_5", "llama", "gpt_oss")
}
every_drafting = pytest.mark.parametrize("make", DRAFTING.values(), ids=DRAFTING.keys())


def reply_without_drafts(
    make: Make, prompt: np.ndarray, num_tokens: int, **params: Any
) -> list[int]:
    return Steps(make(max_depth=0)).generate(1, prompt, num_tokens, **params)


@dataclass
class Speculated:
    """A reply that is verified draft by draft, as the scheduler plans it."""

    steps: Steps
    slot: int
    prompt: np.ndarray
    expected: Sequence[int]  # the whole reply
    wrong: Callable[[int], bool] = lambda _: False  # which of its tokens are guessed wrong
    tokens: list[int] = field(default_factory=list)
    bound: int = 0  # tokens that the row holds at most
    num_steps: int = 0

    def start(self, **params: Any) -> None:
        self.tokens = [self.steps.start(self.slot, self.prompt, **params)]
        self.bound = len(self.prompt)

    def row(self, depth: int, **fields: Any) -> DecodeRow:
        start = len(self.prompt) + len(self.tokens)
        behind = range(len(self.tokens), len(self.expected))
        guesses = [self.expected[at] ^ self.wrong(at) for at in behind]
        depth = min(depth, max(0, start + len(guesses) - self.bound - 1))
        proposal = Proposal(start, np.array(guesses, dtype=np.int32)) if depth else None
        row = DecodeRow(self.slot, self.bound, depth=depth, proposal=proposal, **fields)
        self.bound += 1 + depth
        self.num_steps += 1
        return row

    def take(self, row: DecodeRow, result: StepResult) -> tuple[int, ...]:
        found = result.tokens[self.slot]
        self.tokens += found
        self.bound -= row.depth + 1 - len(found)
        return found

    def finish(self, depth: int, *, overlap: bool) -> list[int]:
        in_flight: list[tuple[DecodeRow, PendingStep]] = []
        while len(self.tokens) < len(self.expected):
            row = self.row(depth)
            in_flight.append((row, self.steps.launch(decode=(row,))))
            if len(in_flight) > overlap:
                row, step = in_flight.pop(0)
                self.take(row, step.wait())
        for _, step in in_flight:
            step.wait()
        return self.tokens[: len(self.expected)]


RIGHT: dict[str, Callable[[int], bool]] = {
    "all": lambda _: False,
    "none": lambda _: True,
    "some": lambda at: at % 5 in (1, 3),
}


@every_drafting
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reply_is_the_same_whichever_drafts_are_right(make: Make, temperature: float) -> None:
    """Through more than one move of tails into mains."""
    prompt, params = make_tokens(30), {"temperature": temperature, "seed": 5}
    expected = reply_without_drafts(make, prompt, 150, **params)
    for (name, wrong), overlap in product(RIGHT.items(), (False, True)):
        reply = Speculated(Steps(make()), 1, prompt, expected, wrong)
        reply.start(**params)
        assert reply.finish(3, overlap=overlap) == expected, (name, overlap)
        if name == "all":
            assert reply.num_steps <= 150 // 4 + 2
        if name == "none":
            assert reply.num_steps >= 149


@every_drafting
def test_a_row_that_steps_pass_over_keeps_the_drafts_that_it_accepted(make: Make) -> None:
    prompt, other = make_tokens(9, 1), make_tokens(14, 2)
    expected = reply_without_drafts(make, prompt, 20)
    beside = reply_without_drafts(make, other, 40)
    steps = Steps(make())
    reply = Speculated(steps, 1, prompt, expected, lambda at: at % 4 == 3)
    busy = Speculated(steps, 2, other, beside)
    reply.start()
    busy.start()
    while len(reply.tokens) < 17:
        row = reply.row(3)
        reply.take(row, steps.run(decode=(row,)))
        for _ in range(2):
            row = busy.row(1)
            busy.take(row, steps.run(decode=(row,)))
    assert reply.tokens == expected[: len(reply.tokens)]
    assert busy.tokens == beside[: len(busy.tokens)]


@every_drafting
def test_forced_tokens_follow_accepted_drafts(make: Make) -> None:
    """A chunk of a reply, as where a grammar forces tokens, is as good as decoding them."""
    prompt = make_tokens(11)
    expected = reply_without_drafts(make, prompt, 20)
    steps = Steps(make())
    reply = Speculated(steps, 1, prompt, expected)
    reply.start()
    row = reply.row(3)
    reply.take(row, steps.run(decode=(row,)))
    at = len(reply.tokens) - 1  # the token that was sampled last
    forced = np.array(expected[at : at + 3], dtype=np.int32)
    result = steps.run(prefill=(PrefillRow(1, reply.bound, forced, samples=True),))
    reply.tokens += [*expected[at + 1 : at + 3], *result.tokens[1]]
    reply.bound += 3
    assert reply.finish(2, overlap=True) == expected


@every_drafting
def test_a_slot_that_is_admitted_again_remembers_no_drafts(make: Make) -> None:
    first, second = make_tokens(9, 1), make_tokens(7, 2)
    expected = reply_without_drafts(make, second, 8)
    steps = Steps(make())
    reply = Speculated(steps, 3, first, reply_without_drafts(make, first, 12))
    reply.start()
    row = reply.row(4)
    reply.take(row, steps.run(decode=(row,)))
    steps.run(retire=(Retire(3),))
    again = Speculated(steps, 3, second, expected)
    again.start()
    assert again.finish(2, overlap=True) == expected


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "deepseek_v3"])
def test_models_whose_rows_verify_no_drafts_say_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = MLXBackend(served(name), num_slots=2, max_depth=2)
    assert backend.max_depth == 0
    assert "no drafts are verified" in caplog.text


def test_deterministic_rows_verify_no_drafts_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    backend = MLXBackend(served("llama"), num_slots=2, max_depth=2, deterministic=True)
    assert backend.max_depth == backend.drafts_itself == 0
    assert "no drafts are verified: with --deterministic" in caplog.text
