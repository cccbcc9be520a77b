"""Ladders: few lengths for many, so that little is ever new to a GPU.

There a shape that was never seen costs far more than a known one: libraries choose and load
kernels, graphs are built. Lengths are rounded up to the next rung; the finer the ladder, the less
is computed or held for nothing, and the more there is to warm up.
"""

from __future__ import annotations

from pippin.backends.base import WarmUpShape


def at_least(length: int, *, rungs: int = 4) -> int:
    """The lowest rung that holds `length`: `rungs` of them from one power of two to the next."""
    if length <= rungs:
        return length
    floor = 1 << (length.bit_length() - 1)
    rung = -(-floor // rungs)
    return -(-length // rung) * rung


class Exact:
    """Every length as it is: where padding would cost more than something new."""

    def chunk(self, num_tokens: int) -> int:
        return num_tokens

    def rows(self, num_rows: int) -> int:
        return num_rows

    def prefix(self, num_tokens: int) -> int:
        return num_tokens


class Ladder(Exact):
    """Of a prefill forward on a GPU: its tokens, its rows, and the longest prefix before it.

    What is padded of a chunk is computed, so its ladder is finer than that of prefixes, which only
    attention reads.
    """

    SHORTEST_CHUNK, SHORTEST_PREFIX = 16, 64

    def chunk(self, num_tokens: int) -> int:
        return max(at_least(num_tokens, rungs=2), self.SHORTEST_CHUNK)

    def rows(self, num_rows: int) -> int:
        return at_least(num_rows, rungs=1)

    def prefix(self, num_tokens: int) -> int:
        return max(at_least(num_tokens, rungs=1), self.SHORTEST_PREFIX) if num_tokens else 0


def to_warm_up(most_tokens: int, most_rows: int) -> list[WarmUpShape]:
    """The rungs that requests meet, the most likely first: short prompts, then rows side by side,
    then prompts that go on where others ended, then all the rest."""
    rungs = [n for k in range(4, 20) for n in (1 << k, 3 << (k - 1)) if n <= most_tokens]
    likely = [n for n in (64, 256, 128, 512, 32, 1024) if n <= most_tokens]
    widths = [n for n in (2, 4, 8, 3, 6, 12, 16, 24, 32, 48, 64) if n <= most_rows]
    shapes = [WarmUpShape(1, n, num_steps=3) for n in likely]
    shapes += [WarmUpShape(n, 48, num_steps=3) for n in widths]
    shapes += [WarmUpShape(1, n, num_before=before) for n in likely for before in (512, 2048)]
    shapes += [WarmUpShape(1, n) for n in rungs if n not in likely]
    shapes += [WarmUpShape(2, n) for n in likely]
    shapes += [
        WarmUpShape(1, n, num_before=before)
        for before in (64, 128, 256, 1024, 4096)
        for n in rungs
        if before + n <= 2 * most_tokens
    ]
    return shapes
