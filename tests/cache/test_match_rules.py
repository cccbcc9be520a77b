"""Where a match ends, and what it hands over, for each component of the design's table."""

from __future__ import annotations

import numpy as np
import pytest
from naive_cache import A, CheckedCache, S, W

from pippin.cache.prefix_cache import PrefixCache


def sequence(*runs: tuple[int, int]) -> list[int]:
    """Runs of (token, count), end to end."""
    return [token for token, count in runs for _ in range(count)]


def test_attention_matches_up_to_any_token() -> None:
    checked = CheckedCache([A])
    checked.insert(sequence((1, 5), (2, 5)), 0)
    assert checked.match(sequence((1, 5), (2, 2), (3, 9))).length == 7
    assert checked.match(sequence((1, 3))).length == 3
    assert checked.match([9]).length == 0


def test_limit_leaves_a_token_to_compute() -> None:
    checked = CheckedCache([A])
    prompt = sequence((1, 8))
    checked.insert(prompt, 0)
    match = checked.match(prompt, limit=len(prompt) - 1)
    assert (match.length, match.branch, match.prompt_len) == (7, 8, 8)
    assert sum(piece.num_tokens for piece in match.payloads[A]) == 7


def test_state_matches_only_where_one_was_kept() -> None:
    checked = CheckedCache([A, S])
    prompt = sequence((1, 10))
    checked.insert(prompt, 0, states=[4, 8])
    assert checked.match(prompt).length == 8
    assert checked.match(prompt, limit=7).length == 4
    assert checked.match(prompt[:3]).length == 0
    assert checked.match([*prompt[:6], 2]).branch == 6


def test_without_attention_states_alone_make_a_match() -> None:
    checked = CheckedCache([S])
    prompt = sequence((1, 10))
    checked.insert(prompt, 6, states=[8])
    match = checked.match([*prompt, 2])
    assert match.length == 8
    assert set(match.payloads) == {S}


def test_window_needs_only_the_last_tokens() -> None:
    checked = CheckedCache([A, W], window=4)
    prompt = sequence((1, 12))
    checked.insert(prompt, 0, kv=[A])
    assert checked.match(prompt).length == 0
    checked.insert(prompt, 6, kv=[W])  # as after a recomputation
    match = checked.match(prompt)
    assert match.length == 12
    assert sum(piece.num_tokens for piece in match.payloads[W]) == 6
    assert checked.match(prompt, limit=10).length == 10
    assert checked.match(prompt, limit=9).length == 0  # one token of its window is missing


def test_short_prefix_needs_no_more_window_than_it_has() -> None:
    checked = CheckedCache([A, W], window=100)
    checked.insert(sequence((1, 5)), 0)
    assert checked.match(sequence((1, 3), (2, 3))).length == 3


def test_match_ends_where_every_component_is_valid() -> None:
    checked = CheckedCache([A, W, S], window=3)
    prompt = sequence((1, 12))
    checked.insert(prompt, 0, states=[4, 8, 12], kv=[A])
    checked.insert(prompt, 6, kv=[W])
    assert checked.match(prompt).length == 12
    assert checked.match(prompt, limit=11).length == 0  # 8 has 2 tokens of window, 4 has none
    checked.insert(prompt, 5, kv=[W])
    assert checked.match(prompt, limit=11).length == 8


def test_branch_is_where_the_prompt_leaves_the_tree() -> None:
    checked = CheckedCache([A, S])
    checked.insert(sequence((1, 100)), 0, states=[64])
    match = checked.match(sequence((1, 90), (2, 10)))
    assert (match.length, match.branch) == (64, 90)


def test_probe_changes_nothing() -> None:
    checked = CheckedCache([A])
    checked.insert(sequence((1, 8)), 0)
    before = checked.cache.report()
    assert checked.cache.probe(np.array(sequence((1, 5), (2, 1)))) == 5
    assert checked.cache.report() == before


def test_tokens_are_told_apart_over_their_whole_width() -> None:
    checked = CheckedCache([A])
    checked.insert([256, 1, 65536], 0)
    assert checked.match([256, 1, 1]).length == 2
    assert checked.match([1, 256]).length == 0
    assert checked.match(np.array([256, 1, 65536], dtype=np.int64).tolist()).length == 3


def test_payloads_of_a_lock_follow_later_splits() -> None:
    checked = CheckedCache([A])
    prompt = sequence((1, 8))
    checked.insert(prompt, 0)
    match = checked.match(prompt)
    lock = checked.cache.lock(match)
    checked.insert(sequence((1, 4), (2, 4)), 4)
    checked.check_payloads(prompt, 8, checked.cache.payloads(lock))
    assert [piece.num_tokens for piece in checked.cache.payloads(lock)[A]] == [4, 4]


@pytest.mark.parametrize(("components", "window"), [([A], 4), ([A, W], 0), ([], 0)])
def test_contradictory_components_are_refused(components: list[object], window: int) -> None:
    with pytest.raises(ValueError, match=r"window|components"):
        PrefixCache(components, window=window, capacity_bytes=1)  # type: ignore[arg-type]
