"""Where a match ends, and what it hands over, for each component of the design's table."""

from __future__ import annotations

import numpy as np
import pytest
from naive_cache import A, CheckedCache, S, W

from pippin.cache.prefix_cache import PrefixCache


def sequence(*runs: tuple[int, int]) -> list[int]:
    """Runs of (token, count), end to end."""
    return [token for token, count in runs for _ in range(count)]


def test_branch_is_where_the_prompt_leaves_the_tree() -> None:
    checked = CheckedCache([A, S])
    checked.insert(sequence((1, 100)), 0, states=[64])
    match = checked.match(sequence((1, 90), (2, 10)))
    assert (match.length, match.branch) == (64, 90)


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
