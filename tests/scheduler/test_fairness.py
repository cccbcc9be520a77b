"""Pace and turns on a device that takes time: what clients hear, and when.

The costs are those of the bundled model on two cores and of a larger one on a large GPU.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import pytest

from builders import make_prompt, oracle
from timed import LARGE_GPU, TWO_CORES, Ask, Device, Heard, percentile, serve

T0 = 20.0  # by then the pace has learnt what steps cost, and nothing runs
every_device = pytest.mark.parametrize("device", [TWO_CORES, LARGE_GPU], ids=["cores", "gpu"])


def ask(at: float, name: str, length: int, family: int, max_tokens: int = 4) -> Ask:
    return T0 + at, name, make_prompt(length, family), {"max_tokens": max_tokens}


def learnt() -> list[Ask]:
    """Requests of all kinds, long before the others."""
    return [
        ask(-T0, "a", 600, 90, 30),
        ask(-T0 + 3, "b", 30, 91, 60),
        ask(-T0 + 3.1, "c", 700, 92, 4),
    ]


def run(device: Device, *asks: Ask, max_gap: float = 0.2) -> dict[str, Heard]:
    return serve(device, [*learnt(), *asks], max_gap=max_gap)


@pytest.mark.parametrize("comes_at", [0.01, 0.3, 1.0])
def test_a_short_prompt_is_not_held_up_by_a_long_one_nor_the_long_one_by_it(
    comes_at: float,
) -> None:
    alone = run(TWO_CORES, ask(0, "long", 4500, 1))["long"].ttft
    heard = run(TWO_CORES, ask(0, "long", 4500, 1), ask(comes_at, "short", 20, 2))
    assert heard["short"].ttft < 0.2 * heard["long"].ttft
    assert heard["long"].ttft < 1.1 * alone


def test_whoever_comes_during_a_long_step_is_in_the_next() -> None:
    step = TWO_CORES.seconds(0, 512)
    heard = run(TWO_CORES, ask(0, "long", 4500, 1), ask(0.01, "short", 20, 2))
    assert heard["short"].ttft < step + TWO_CORES.seconds(0, 20 + 64)


@pytest.mark.parametrize("every", [0.9, 1.5])
def test_a_stream_keeps_its_pace_while_long_prompts_arrive(every: float) -> None:
    idle = median(run(TWO_CORES, ask(0, "stream", 50, 1, 100))["stream"].gaps)
    asks = [ask(0.6 + every * n, f"p{n}", 2000, 50 + n) for n in range(4)]
    heard = run(TWO_CORES, ask(0, "stream", 50, 1, 700), *asks)
    assert percentile(heard["stream"].gaps, 0.99) < 4 * idle
    assert heard["p0"].ttft < 2.9 * run(TWO_CORES, ask(0, "p0", 2000, 50))["p0"].ttft


def test_where_forwards_are_dear_prompts_beside_a_stream_are_computed_in_few_of_them() -> None:
    """Steps of a few tokens would take 40 ms each, and the prompts 6 seconds."""
    asks = [ask(0.6 + 0.9 * n, f"p{n}", 8000, 50 + n) for n in range(4)]
    heard = run(LARGE_GPU, ask(0, "stream", 50, 1, 700), *asks)
    assert max(heard[f"p{n}"].ttft for n in range(4)) < 1.0
    assert percentile(heard["stream"].gaps, 0.9) < 0.01


@every_device
@pytest.mark.parametrize("max_gap", [0.06, 0.1])
def test_no_gap_is_longer_than_asked_for(device: Device, max_gap: float) -> None:
    asks = [ask(0.5 + 0.2 * n, f"p{n}", 3000, 50 + n) for n in range(6)]
    streams = [ask(0, f"s{n}", 30, n, 500) for n in range(8)]
    heard = run(device, *streams, *asks, max_gap=max_gap)
    for n in range(8):
        times = heard[f"s{n}"].times
        late = [b - a for a, b in pairwise(times) if a > T0 + 0.5]
        assert max(late) < 1.05 * max_gap


@every_device
def test_a_long_prompt_is_not_starved_by_short_ones_that_never_stop(device: Device) -> None:
    """They take half of the device by themselves."""
    shorts_take = device.seconds(0, 40) + 3 * device.seconds(2, 0)
    every = 2 * shorts_take
    shorts = [ask(every * n, f"s{n}", 40, 100 + n, 3) for n in range(200)]
    alone = run(device, ask(0.3, "long", 4500, 1))["long"].ttft
    heard = run(device, ask(0.3, "long", 4500, 1), *shorts)
    assert heard["long"].times[0] < heard["s199"].times[0]
    assert heard["long"].ttft < 8 * alone
    assert percentile([heard[f"s{n}"].ttft for n in range(200)], 0.9) < 10 * shorts_take


@every_device
def test_the_same_prompt_again_is_answered_at_once_beside_streams_and_prompts(
    device: Device,
) -> None:
    asks = [ask(0, f"s{n}", 30, n, 300) for n in range(4)]
    asks += [ask(1.0, "known", 1000, 7), ask(4.0, "long", 6000, 8), ask(4.3, "again", 1000, 7)]
    heard = run(device, *asks)
    cold = run(device, ask(0, "known", 1000, 7))["known"].ttft
    assert heard["again"].reply.cached_tokens == 1000
    assert heard["again"].ttft < 3 * 0.2
    assert heard["again"].ttft < cold or device is LARGE_GPU
    assert heard["again"].reply.tokens == oracle(make_prompt(1000, 7))[0]
