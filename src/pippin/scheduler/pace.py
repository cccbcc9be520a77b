"""How many prompt tokens a step may compute so that running streams keep their pace."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pippin.types import GRID

STEP_STRETCH = 2.6  # a step with prefill may take this many times a decode-only step
SMALLEST_CHUNK = GRID // 2
# What a forward costs beside its tokens, counted in tokens. The bundled model on two cores takes
# 22 ms for 16 tokens, 27 for 32, 38 for 64 and 67 for 128.
FORWARD_TOKENS = 32
SMOOTHING = 0.2


@dataclass
class Pace:
    """Learns the cost of a decode step and of prompt tokens from finished steps.

    Without running streams a step takes `prefill_tokens`. With them, as many as fit in
    `STEP_STRETCH` decode steps, but no crumbs: a forward of a few tokens holds streams up almost
    as long as one of half a block, and prompts far longer.
    """

    prefill_tokens: int
    decode_seconds: float = 0.0
    seconds_per_token: float = 0.0

    def budget(self, num_streams: int) -> int:
        if num_streams == 0:
            return self.prefill_tokens
        if not (self.decode_seconds and self.seconds_per_token):
            return min(GRID, self.prefill_tokens)
        spare = (STEP_STRETCH - 1.0) * self.decode_seconds
        tokens = math.floor(spare / self.seconds_per_token) - FORWARD_TOKENS
        tokens -= tokens % (GRID if tokens >= GRID else SMALLEST_CHUNK)
        return min(max(tokens, SMALLEST_CHUNK), self.prefill_tokens)

    def observe(self, *, seconds: float, prefill_tokens: int, decode_rows: int) -> None:
        if prefill_tokens == 0:
            if decode_rows:
                self.decode_seconds = _blend(self.decode_seconds, seconds)
            return
        decode = self.decode_seconds if decode_rows else 0.0
        per_token = max(seconds - decode, 0.1 * seconds) / (prefill_tokens + FORWARD_TOKENS)
        self.seconds_per_token = _blend(self.seconds_per_token, per_token)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + SMOOTHING * (new - old)
