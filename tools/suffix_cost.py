"""What the suffix drafter costs the host a step, by the length of a request's text.

    python tools/suffix_cost.py [--steps 2000] [--depth 8]

Texts: words that occur again and again, tokens that never repeat, one token repeated, a period of
seven. A step adds one token, indexes it and proposes; the first steps, which index the prompt, are
shown by themselves.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

from pippin.messages import Submit, pack_tokens
from pippin.scheduler.request import Request
from pippin.scheduler.speculation.suffix import SuffixDrafter
from pippin.types import SamplingParams

LENGTHS = 1_000, 10_000, 100_000


def words(length: int) -> list[int]:
    rng = random.Random(0)
    vocabulary = [[rng.randrange(150_000) for _ in range(rng.randint(1, 30))] for _ in range(300)]
    return [token for word in rng.choices(vocabulary, k=length) for token in word][:length]


TEXTS: dict[str, Callable[[int], Sequence[int]]] = {
    "words": words,
    "no repeats": lambda length: range(length),
    "one token": lambda length: [5] * length,
    "period of 7": lambda length: [number % 7 for number in range(length)],
}


def measure(text: Sequence[int], num_steps: int, depth: int) -> tuple[float, float, float, int]:
    """Microseconds of a step at the median and the 99th percentile, of one that indexes the prompt,
    and bytes."""
    length = len(text) - num_steps
    params = SamplingParams(max_tokens=num_steps + 1)
    submit = Submit(id="r", tokens=pack_tokens(text[:length]), params=params, stop_ids=[])
    request = Request.from_submit(submit, seed=0, arrival=0)
    drafter = SuffixDrafter(None)
    catching_up, steps = [], []
    for token in text[length:]:
        began = perf_counter()
        drafter.prepare([request])
        drafter.propose(request, 2 * depth + 2)
        seconds = perf_counter() - began
        behind = drafter._texts["r"].index.num_unindexed
        (catching_up if behind or not steps else steps).append(seconds)
        steps = steps or ([] if behind else [seconds])
        request.append(token)
    index = drafter._texts["r"].index
    ordered = sorted(steps)
    return (
        median(ordered) * 1e6,
        ordered[len(ordered) * 99 // 100] * 1e6,
        median(catching_up) * 1e6,
        index.nbytes,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--depth", type=int, default=8)
    asked = parser.parse_args()
    print("text          tokens   us a step   99%   us while indexing   bytes a token")
    for name, make in TEXTS.items():
        for length in LENGTHS:
            text = make(length + asked.steps)
            typical, slow, indexing, nbytes = measure(text, asked.steps, asked.depth)
            share = nbytes / len(text)
            print(f"{name:12} {length:7} {typical:9.1f} {slow:7.1f} {indexing:14.1f} {share:14.1f}")


if __name__ == "__main__":
    main()
