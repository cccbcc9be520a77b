"""How many prompt tokens a step may compute so that running streams keep their pace."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from pippin.types import GRID

STEP_STRETCH = 2.6  # a step with one prompt in it may take this many times a decode-only step,
LONGEST_STRETCH = 5.0  # and up to this many the more other prompts wait for each stream that runs
SMALLEST_CHUNK = GRID // 2
# What a forward costs beside its tokens, counted in tokens. The bundled model on two cores takes
# 22 ms for 16 tokens, 27 for 32, 38 for 64 and 67 for 128.
FORWARD_TOKENS = 32
REMEMBERED_STEPS = 31


def _recent() -> deque[float]:
    return deque(maxlen=REMEMBERED_STEPS)


@dataclass
class Pace:
    """Learns the cost of a decode step and of prompt tokens from finished steps.

    Without running streams a step takes `prefill_tokens`. With them, as many as fit in
    `STEP_STRETCH` decode steps, more where many wait and few run, and half a block at least: a
    forward of a few tokens holds streams up almost as long, and prompts far longer.

    Costs are medians: a step that met a pause of the machine, a regrouping of rows or another
    step's prompt says nothing about the next one. A mean let one such step double the chunks.
    """

    prefill_tokens: int
    _decode_seconds: deque[float] = field(default_factory=_recent)  # of decode-only steps
    _token_seconds: deque[float] = field(default_factory=_recent)

    def budget(self, num_streams: int, num_prompts: int = 1) -> int:
        if num_streams == 0:
            return self.prefill_tokens
        if not (self._decode_seconds and self._token_seconds):
            return min(GRID, self.prefill_tokens)
        stretch = min(STEP_STRETCH * (1.0 + (num_prompts - 1) / num_streams), LONGEST_STRETCH)
        spare = (stretch - 1.0) * median(self._decode_seconds)
        tokens = math.floor(spare / median(self._token_seconds)) - FORWARD_TOKENS
        return min(max(tokens, SMALLEST_CHUNK), self.prefill_tokens)

    def observe(self, *, seconds: float, prefill_tokens: int, decode_rows: int) -> None:
        if prefill_tokens == 0:
            if decode_rows:
                self._decode_seconds.append(seconds)
            return
        decode = median(self._decode_seconds) if decode_rows and self._decode_seconds else 0.0
        per_token = max(seconds - decode, 0.1 * seconds) / (prefill_tokens + FORWARD_TOKENS)
        self._token_seconds.append(per_token)
