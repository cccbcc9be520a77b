"""Simulated worlds: 30,000 steps of clients, faults and short bytes. `make simulate` runs more."""

from __future__ import annotations

import logging

import pytest

from peer_world import simulate_peers
from simulator import simulate

STEPS_PER_WORLD = 400
WORLDS_PER_BATCH = 5
NUM_BATCHES = 3
LEAST_STEPS = 10_000  # of a batch: with those in which all is left to end, 30,000 together


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_worlds_go_as_they_should(batch: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # failed steps are what this is about
    first = batch * WORLDS_PER_BATCH
    steps = sum(simulate(seed, STEPS_PER_WORLD) for seed in range(first, first + WORLDS_PER_BATCH))
    seed = first + WORLDS_PER_BATCH
    while steps < LEAST_STEPS:
        steps += simulate(100_000 + seed, STEPS_PER_WORLD)
        seed += 1


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(270, id="a load was evicted before it was locked"),
        pytest.param(135, id="one tier's load evicted what another was to write"),
    ],
)
def test_worlds_that_went_wrong_once(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    simulate(seed, STEPS_PER_WORLD, drafts=False)  # drafts would change what happens when


def test_a_claim_covers_what_rejected_drafts_wrote(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    simulate(61, STEPS_PER_WORLD)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(457, id="a restart after damage keeps what a peer sent"),
        pytest.param(954, id="a request that is too large ends though hand-overs were just over"),
    ],
)
def test_worlds_of_two_engines_that_went_wrong_once(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    simulate_peers(seed, STEPS_PER_WORLD)


@pytest.mark.parametrize("seed", range(6))
def test_prompts_of_another_engine_come_over_a_wire_that_loses_things(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Both engines fail, the prefill engine dies, entries are lost, late, doubled and damaged."""
    caplog.set_level(logging.CRITICAL)
    simulate_peers(seed, 100)
