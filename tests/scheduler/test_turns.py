"""How prompts share a step: short ones are not held up, long ones are not passed for ever."""

from __future__ import annotations

from pippin.scheduler.prompts import Turn, beside_short, share


def test_the_one_that_has_waited_longest_for_what_it_needs_goes_first() -> None:
    assert share([Turn(400, 0), Turn(100, 100)], 300) == [200, 100]
    assert share([Turn(400, 4000), Turn(400, 100)], 300) == [300, 0]


def test_half_of_a_step_is_kept_for_whoever_can_be_done_with_it() -> None:
    assert share([Turn(4000, 9000), Turn(100, 0)], 300) == [200, 100]
    assert share([Turn(4000, 9000), Turn(200, 0)], 300) == [300, 0]
    assert share([Turn(4000, 9000)], 300, shortest_waiting=20) == [280]


def test_those_not_finished_share_what_is_for_them() -> None:
    turns = [Turn(4000, 100), Turn(20, 0), Turn(3000, 10)]
    assert share(turns, 512, for_unfinished=64) == [64, 20, 0]
    assert sum(share(turns, 512)) == 512


def test_beside_a_short_prompt_long_ones_get_as_much_again_or_a_productive_chunk() -> None:
    long = Turn(4000, 100)
    assert beside_short([long, Turn(20, 0)], 512, 64) == 64
    assert beside_short([long, Turn(200, 0)], 512, 64) == 200
    assert beside_short([long], 512, 64, shortest_waiting=20) == 64
    assert beside_short([long, Turn(20, 0)], 512, 4096) == 512


def test_where_nobody_is_done_soon_a_step_is_whole() -> None:
    assert beside_short([Turn(4000, 100), Turn(300, 0)], 512, 64) == 512
    assert beside_short([], 512, 64) == 512


def test_the_highest_priority_takes_what_it_can_use() -> None:
    assert share([Turn(400, 9000), Turn(4000, 0, priority=1)], 300) == [0, 300]
    assert share([Turn(400, 9000), Turn(100, 0, priority=1)], 300) == [200, 100]
    assert share([Turn(100, 0), Turn(4000, 0, priority=1)], 300) == [0, 300], "nothing is kept"
