"""The cache's state as plain values."""

from __future__ import annotations

import json

from naive_cache import NBYTES, A, CheckedCache, S

from pippin.cache.tree.payload_tree import NUM_RECENT


def recent(checked: CheckedCache) -> list[tuple[int, int, bool]]:
    """First token, length and whether it is locked, of the paths that were used last."""
    paths = checked.cache.report()["recent_paths"]
    assert isinstance(paths, list)
    return [(path["first_tokens"][0], path["tokens"], path["locked"]) for path in paths]


def test_report_tells_what_is_held_and_what_it_was_good_for() -> None:
    checked = CheckedCache([A, S])
    prompt = list(range(70))
    checked.insert(prompt, 0, states=[64, 70])
    checked.lock(prompt, limit=69)
    report = checked.cache.report()
    assert report["tokens"] == 70
    assert report["component_bytes"] == {"attention": 70 * NBYTES[A], "state": 2 * NBYTES[S]}
    assert report["hit_rate"] == 64 / 70
    assert report["checkpoints"]["grid"] == {  # type: ignore[index]
        "placed": 1,
        "used": 1,
        "tokens_saved": 64,
        "evicted": 0,
    }
    assert report["evictable_bytes"] == checked.cache.evictable_bytes == 6 * NBYTES[A] + NBYTES[S]

    assert json.loads(json.dumps(report)) == report


def test_recent_paths_are_the_last_used_each_at_its_longest() -> None:
    checked = CheckedCache([A])
    for token in range(NUM_RECENT + 2):
        checked.insert([token] * 4, 0)
        checked.insert([token] * 8, 4)
    checked.lock([3] * 8)
    newest = NUM_RECENT + 1
    others = [token for token in range(newest, 0, -1) if token != 3]
    assert recent(checked) == [(3, 8, True), *[(t, 8, False) for t in others]][:NUM_RECENT]


def test_recent_paths_leave_out_what_is_gone() -> None:
    checked = CheckedCache([A])
    checked.insert([1] * 4, 0)
    checked.insert([2] * 4, 0)
    checked.match([3])
    checked.evict(1)
    assert recent(checked) == [(2, 4, False)]
