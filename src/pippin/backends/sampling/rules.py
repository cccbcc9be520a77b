"""What sampling means on every backend: the stages, how a row chooses, log probabilities.

Knows no arrays: a backend writes the stages in operations of its own. A row of float32 logits
passes these, in vLLM's and transformers' order, each only if it asks for it:

    logit_bias, min_tokens → penalties → grammar mask → temperature → top_k → top_p → min_p → draw

    logit_bias   x[i] + bias[i]
    min_tokens   until the reply has as many tokens, stop ids are lowered by FAR
    penalties    x / repetition where x > 0, else x * repetition, of tokens in prompt or reply; then
                 - frequency * count in the reply - presence where that is not 0
    mask         lowered by more than FAR where a grammar forbids: one that allows only a stop wins
    temperature  x * (1 / temperature); below GREEDY_BELOW the row takes the largest x instead
    top_k        keeps what is no less than the k-th largest x
    top_p        keeps, of those k or of all, the smallest set of the largest with top_p of the
                 mass, counted in whole units of 1 / MASS_UNITS of the likeliest token's
    min_p        keeps what has at least min_p of the likeliest token's mass
    draw         the largest x[i] + g[i] of what every filter keeps, g as in `noise`

Filters are thresholds: tokens that tie with the last one kept are kept too, so no sort order
matters; and sums of whole units are the same in any order, so no way of adding up does. Of tokens
that tie for the k-th place, as many count for the mass as belong to the k. Of equal sums the first
token is taken. What a row draws depends on that row alone.

Log probabilities are those of the model itself, as OpenAI and vLLM report them by default:
x - logsumexp(x) of the raw logits in float32, before any stage. Alternatives are the likeliest
tokens, likeliest first and equal ones by id; they need not include the one drawn.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from pippin.backends.base import Admit
from pippin.backends.sampling.noise import stream_of
from pippin.types import SamplingParams

# Of a prompt whose positions are all scored: float32 logits at a time, and positions at the most.
SCORED_BYTES, SCORED_POSITIONS = 64 << 20, 256
MASS_UNITS = 2.0**40  # of which a million tokens have less than 2^63
SHORT = 128  # a top_k up to this needs only a partition; fixed, so that no batchmate changes it
GREEDY_BELOW = 1e-5  # a lower temperature overflows logits / temperature, and is greedy anyway
FAR = 1e30  # farther below any logit than noise or bias can reach, and still finite


class Draw(enum.Enum):
    """How a row chooses its token; a row's own parameters decide, never its batchmates'."""

    GREEDY = "greedy"
    PLAIN = "plain"  # temperature, perhaps min_p: needs at most the maximum
    SHORT_TOP_K = "short_top_k"  # perhaps with top_p and min_p: needs the SHORT largest
    LONG_TOP_K = "long_top_k"  # the same for a large k: needs the order of all
    TOP_P = "top_p"  # without top_k, perhaps min_p: needs the order of all


@dataclass(frozen=True)
class SlotSampling:
    """One admitted request's parameters, as a sampler wants them."""

    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    stream: int = 0  # uint64: the slot's random stream; token i uses the key `stream + i`

    @classmethod
    def of(cls, admit: Admit) -> SlotSampling:
        return cls(admit.params, admit.stop_ids, stream_of(admit.seed))

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    def draw(self, vocab_size: int) -> Draw:
        params = self.params
        if self.is_greedy:
            return Draw.GREEDY
        if 0 < params.top_k < vocab_size:
            return Draw.SHORT_TOP_K if params.top_k <= SHORT else Draw.LONG_TOP_K
        return Draw.TOP_P if params.top_p < 1.0 else Draw.PLAIN

    @property
    def inverse_temperature(self) -> float:
        return 1.0 / max(self.params.temperature, GREEDY_BELOW)

    @property
    def top_p(self) -> float:
        """Infinite where off: rounding in a cumulative sum must not drop a token."""
        return self.params.top_p if self.params.top_p < 1.0 else math.inf

    def choice(self, vocab_size: int) -> tuple[float, float, float, float]:
        """1 / temperature, top_k, top_p, min_p; 0, 0, inf and 0 where off."""
        draw = self.draw(vocab_size)
        if draw is Draw.GREEDY:
            return 0.0, 0.0, math.inf, 0.0
        top_k = self.params.top_k if draw in (Draw.SHORT_TOP_K, Draw.LONG_TOP_K) else 0
        return self.inverse_temperature, top_k, self.top_p, self.params.min_p


PADDING = SlotSampling(SamplingParams(temperature=0.0))


def scored_positions(vocab_size: int, block_bytes: int = SCORED_BYTES) -> int:
    """How many positions of a prompt are scored at a time."""
    return min(max(block_bytes // (4 * vocab_size), 1), SCORED_POSITIONS)
