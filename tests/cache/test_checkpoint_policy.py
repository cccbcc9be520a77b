"""Where checkpoints are placed, and what they are worth."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pippin.cache.policy import PRIOR, CheckpointPolicy, Placement, worth

CHEAP = CheckpointPolicy(state_bytes=10_000, kv_bytes_per_token=1_000)
DEAR = CheckpointPolicy(state_bytes=1_500_000, kv_bytes_per_token=1_000)


def test_states_stand_on_the_grid_and_at_the_end_with_one_before_it() -> None:
    assert tuple(CHEAP.placements(0, 200, prompt_len=1000)) == (64, 128, 192)
    assert tuple(DEAR.placements(0, 512, prompt_len=1000)) == (128, 256, 384, 512)
    assert tuple(DEAR.placements(0, 192, prompt_len=192)) == (128, 192)
    assert tuple(DEAR.placements(0, 128, prompt_len=128)) == (64, 128)
    ends = {320: Placement.GRID, 330: Placement.PROMPT_END}
    assert DEAR.placements(256, 330, prompt_len=330) == ends


def test_boundaries_and_branches_are_rounded_down_to_the_grid() -> None:
    found = DEAR.placements(0, 512, prompt_len=1000, boundaries=[70, 200], branch=330)
    assert found[64] is found[192] is Placement.BOUNDARY
    assert found[320] is Placement.BRANCH


def test_a_budget_widens_the_stride() -> None:
    policy = CheckpointPolicy(state_bytes=1_000, kv_bytes_per_token=1, prompt_budget_bytes=8_000)
    assert policy.stride(1_000) == 128
    assert policy.stride(100_000) == 16_384


@given(
    shared=st.integers(1, 3000),
    prompt_len=st.integers(1, 3000),
    chunk=st.integers(1, 600),
    dear=st.booleans(),
)
def test_at_most_127_tokens_of_a_shared_prefix_are_recomputed(
    shared: int, prompt_len: int, chunk: int, dear: bool
) -> None:
    policy = DEAR if dear else CHEAP
    held = {0}
    for start in range(0, prompt_len, chunk):
        end = min(start + chunk, prompt_len)
        positions = tuple(policy.placements(start, end, prompt_len=prompt_len))
        assert all(start < position <= end for position in positions)
        assert list(positions) == sorted(set(positions))
        held.update(positions)
    usable = min(shared, prompt_len)
    assert usable - max(position for position in held if position <= usable) <= 127
    repeat = prompt_len - 1  # the same prompt again must compute at least one token
    assert repeat - max(position for position in held if position <= repeat) <= 127


def test_decoding_keeps_grid_states() -> None:
    assert [p for p in range(1, 300) if CHEAP.captures_decode(p)] == [64, 128, 192, 256]
    assert [p for p in range(1, 300) if DEAR.captures_decode(p)] == [128, 256]


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((Placement.BRANCH, 0, 64, 100), (Placement.GRID, 0, 64, 100)),
        ((Placement.GRID, 3, 64, 100), (Placement.GRID, 0, 64, 100)),
        ((Placement.GRID, 0, 640, 100), (Placement.GRID, 0, 64, 100)),
        ((Placement.GRID, 0, 64, 50), (Placement.GRID, 0, 64, 100)),
    ],
)
def test_worth_grows_with_use_and_tokens_and_shrinks_with_bytes(
    better: tuple[Placement, int, int, int], worse: tuple[Placement, int, int, int]
) -> None:
    assert worth(PRIOR[better[0]], *better[1:]) > worth(PRIOR[worse[0]], *worse[1:])


def grown_and_thinned(num_positions: int, num_kept: int) -> list[int]:
    """Distances from the end of what is left of a reply that was thinned as it grew."""
    held: tuple[int, ...] = ()
    for position in range(1, num_positions + 1):
        held = DEAR.thinned([*held, position], num_kept)
    return [held[-1] - position for position in held]


def test_a_thinned_reply_keeps_its_last_checkpoints_and_fewer_the_further_back() -> None:
    assert DEAR.thinned(range(64, 64 * 9, 64), 4) == (256, 384, 448, 512)
    assert grown_and_thinned(100, 8) == [36, 20, 12, 8, 4, 2, 1, 0]


@pytest.mark.parametrize("num_kept", [8, 16, 32])
def test_who_leaves_a_thinned_reply_computes_little_that_lies_far_back(num_kept: int) -> None:
    """At most twice as much as lies between there and the end, wherever that is."""
    distances = [100, *grown_and_thinned(100, num_kept)]  # the prompt ends at the first
    assert all(further - nearer <= 2 * (nearer + 1) for further, nearer in pairwise(distances))


@given(positions=st.sets(st.integers(1, 1_000), max_size=40), num_kept=st.integers(0, 40))
def test_thinning_keeps_as_many_as_asked_for_and_always_the_last(
    positions: set[int], num_kept: int
) -> None:
    kept = DEAR.thinned(positions, num_kept)
    assert len(kept) == min(num_kept, len(positions))
    assert set(kept) <= positions
    assert list(kept) == sorted(kept)
    assert not kept or kept[-1] == max(positions)
