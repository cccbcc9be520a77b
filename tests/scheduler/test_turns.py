"""How prompts share a step: short ones are not held up, long ones are not passed for ever."""

from __future__ import annotations

import random

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


def naive_share(turns: list[Turn], budget: int, waiting: int | None) -> list[int]:
    """Of one priority: what is kept is found anew for each."""

    def ratio(i: int) -> float:
        return (turns[i].num_waited + turns[i].num_left) / turns[i].num_left

    shares, left = [0] * len(turns), budget
    order = sorted(range(len(turns)), key=ratio)[::-1]
    for place, index in enumerate(order):
        others = [turns[i].num_left for i in order[place + 1 :]]
        kept = 0
        for num_left in sorted([*others, *([] if waiting is None else [waiting])]):
            if kept + num_left > budget // 2:
                break
            kept += num_left
        shares[index] = min(turns[index].num_left, max(0, left - kept))
        left -= shares[index]
    return shares


def test_what_is_kept_for_short_ones_is_the_same_as_if_found_anew_for_each() -> None:
    rng = random.Random(1)
    for _ in range(300):
        lengths = [
            rng.choice((1, 5, 20, 100, 1000)) + rng.random() for _ in range(rng.randrange(9))
        ]
        turns = [Turn(int(10 * length), rng.randrange(5000)) for length in lengths]
        budget, waiting = rng.randrange(2000), rng.choice((None, 30, 700))
        assert share(turns, budget, shortest_waiting=waiting) == naive_share(turns, budget, waiting)


class Counted(int):
    """A length that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.num_compared += 1
        return int(self) < int(other)

    def __add__(self, other: int) -> int:
        Counted.num_compared += 1
        return int(self) + int(other)

    __radd__ = __add__


def test_many_turns_are_passed_a_few_times_each() -> None:
    Counted.num_compared = 0
    share([Turn(Counted(1000 + i), i) for i in range(1000)], 8192, shortest_waiting=50)
    assert Counted.num_compared < 30 * 1000
