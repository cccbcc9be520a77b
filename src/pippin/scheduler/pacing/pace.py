"""How many prompt tokens a step may compute so that running streams keep their pace.

Knows what steps cost, from their times; knows no requests and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from pippin.scheduler.pacing.costs import ROUNDING, CostModel, Timed
from pippin.types import GRID

STEP_STRETCH = 2.4  # a step with prompts may take this many times a decode-only step,
LONGEST_STRETCH = 3.9  # and up to this many the more prompts wait for each stream that runs
SMOOTH_STEP = 0.010  # seconds: no reader notices steps that take no longer, whatever others take,
CROWDED_STEP = 0.040  # and up to these are accepted the more prompts wait for each stream
SMALLEST_CHUNK = GRID // 2
CHUNK_STEP = GRID // 4  # beside streams chunks are multiples of this, short ones of half of it
LONGER = 1.5  # what chunks this many times as long would take is to be known,
CHUNKS_BETWEEN_EXPLORING = 3  # and until it is, one in so many explores;
MOST_BETWEEN_EXPLORING = 48  # twice as rarely each time, where only shorter ones can:
LEAST_CONTRAST = 1.1  # it is at least this many times as long, or half as long,
MAX_GROWTH = 2.0  # and at most this many times as long
STEPS_BETWEEN_RESTS = 32  # a step without prompts now and then tells the two costs apart,
LONGEST_SAVED = 0.055  # seconds of prompts to save up for: streams wait for all of it at once
MAX_SAVING_STEPS = 32  # without prompts, before a forward that streams cannot pay for runs anyway
PARTS = 16  # of a prompt that is sent while it is computed: what is sent at its end is one,
FORWARDS_WORTH = 8  # but no shorter than so many forwards would take for being forwards
STEPS_BEFORE_REST = 8  # and so many after the number of streams has changed


@dataclass
class Pace:
    """Bounds what prompts take from running streams.

    Without running streams a step takes `prefill_tokens`. With them there are two bounds. Prompts
    may take so much time that a step becomes `STEP_STRETCH` times as long, more where many wait
    and few run; where the device is that fast, a step takes `SMOOTH_STEP`, and up to `CROWDED_STEP`
    in a burst. And no step is planned to take longer than `max_gap`, unless the smallest chunk
    does. A forward of a few tokens holds streams up almost as long as one of many: where that time
    does not pay for a productive one, it is saved up over steps without prompts.

        tokens dominate (CPUs):       |d pp|d pp|d pp|d pp|
        forwards dominate (GPUs):     |d|d|d|d|d|d pppppppp|d|d|d|d|

    Chunks of one size do not show what a forward costs and what its tokens do. So long as steps
    have not shown what longer chunks would take, a chunk now and then explores: it is longer, as
    far as it stays within the gap even if tokens are all that costs, or shorter.
    """

    prefill_tokens: int
    max_gap: float = math.inf  # seconds
    for_streams: bool = True  # False: no client waits for single tokens, and prompts come first
    costs: CostModel = field(default_factory=CostModel)
    _num_mixed: int = STEPS_BETWEEN_RESTS  # steps since streams last had one to themselves
    _credit: float = math.inf  # seconds that prompts may take
    _num_guessed: int = 0  # chunks since one explored; what longer ones would take was a guess
    _between_exploring: int = CHUNKS_BETWEEN_EXPLORING
    _explored_up: bool = False  # the last chunk that explored was a longer one

    def budget(self, num_streams: int, num_prompts: int = 1, num_drafts: int = 0) -> int:
        """Prompt tokens of the next step, where `num_prompts` wait for some: 0 for a rest.

        Its streams verify `num_drafts`. `spend` is called with what is used of them.
        """
        if num_streams == 0 or not self.for_streams:
            return self.prefill_tokens
        self._num_mixed += 1
        known = self.costs.knows_decode(num_streams)
        if self._num_mixed > (STEPS_BETWEEN_RESTS if known else STEPS_BEFORE_REST):
            self._num_mixed = 0
            return 0
        if not self.costs.known:
            return min(GRID, self.prefill_tokens)
        decode = self.costs.decode_seconds(num_streams, num_drafts)
        stretch = min(STEP_STRETCH * (1.0 + num_prompts / num_streams), LONGEST_STRETCH)
        crowd = min((num_prompts - 1) / num_streams, 1.0)
        accepted = SMOOTH_STEP + (CROWDED_STEP - SMOOTH_STEP) * crowd
        smooth = min(accepted, self.max_gap) - decode
        income = max((stretch - 1.0) * decode, smooth)
        smallest = min(SMALLEST_CHUNK, self.prefill_tokens)
        most = max(self._within(self.max_gap - decode), smallest)
        productive = min(self.productive_tokens, self._within(LONGEST_SAVED), most)
        least = max(productive // 2, smallest)
        if self._within(income) < least:  # a forward that pays is saved up for
            least = max(productive, smallest)
        price = self.costs.prefill_seconds(least)
        at_once = max(income, price)
        self._credit = min(self._credit + income, at_once + income)  # a surplus is not lost
        if self._credit < price <= MAX_SAVING_STEPS * income:
            return 0
        tokens = min(max(self._within(min(self._credit, at_once)), least), most)
        seconds = self.max_gap - decode
        tokens = self._reachable(num_streams, tokens, seconds)
        return self._explored(
            num_streams, tokens, seconds, LONGEST_SAVED if smooth <= 0 else smooth
        )

    @property
    def productive_tokens(self) -> int:
        """A chunk of so many takes no longer for being a forward than for its tokens."""
        return self.costs.productive_tokens if self.costs.known else GRID

    def part_tokens(self, prompt_len: int) -> int:
        """Of a step that computes nothing but a prompt which another engine waits for."""
        part = max(-(-prompt_len // PARTS), FORWARDS_WORTH * self.productive_tokens)
        return min(-(-part // GRID) * GRID, self.prefill_tokens)

    def prompt_seconds(self, tokens: int) -> float:
        """What a step of so many prompt tokens, and no streams, should take; 0 if unknown."""
        return self.costs.prefill_seconds(tokens) if tokens and self.costs.known else 0.0

    def compute_seconds(self, tokens: int) -> float:
        """What a prompt of so many should take alone, in as many steps as it takes."""
        steps, rest = divmod(tokens, self.prefill_tokens)
        return steps * self.prompt_seconds(self.prefill_tokens) + self.prompt_seconds(rest)

    def pays_off(self, lengths: Sequence[int], num_streams: int) -> bool:
        """Whether replies whose next tokens are known are to run these at once, in a forward more.

        All of `num_streams` wait for it; each of those replies is a step ahead for every token but
        one. It pays if that is more time.
        """
        if not self.costs.known:
            return False
        gained = sum(length - 1 for length in lengths) * self.costs.decode_seconds(num_streams)
        return gained > num_streams * self.costs.prefill_seconds(sum(lengths))

    def _within(self, seconds: float) -> int:
        """Prompt tokens of a step that has `seconds` for them."""
        if seconds == math.inf:
            return self.prefill_tokens
        return min(self.costs.prefill_tokens(seconds), self.prefill_tokens)

    def _reachable(self, num_streams: int, tokens: int, seconds: float) -> int:
        """No longer than is safe from what was seen, where the costs of more are a guess.

        Down to a multiple, as chunks of few lengths are compiled.
        """
        seen = self.costs.largest_chunk
        if tokens > max(seen, SMALLEST_CHUNK) and not self.costs.predicts(num_streams, tokens):
            tokens = min(tokens, max(self._safe(seen, seconds), SMALLEST_CHUNK))
        if self.productive_tokens > GRID:
            return tokens
        step = CHUNK_STEP if tokens >= GRID else CHUNK_STEP // 2
        return max(tokens // step * step, min(tokens, step))

    def _explored(self, num_streams: int, tokens: int, seconds: float, longest: float) -> int:
        """Another length now and then, so long as steps do not show what longer chunks would take.

        Longer ones and shorter ones in turn, where both are possible; of at most `longest` seconds,
        unless those that are planned take longer.
        """
        more = min(math.ceil(LONGER * tokens), self.prefill_tokens)
        if more == tokens or self.costs.predicts(num_streams, more):
            return tokens
        self._num_guessed += 1
        if self._num_guessed < self._between_exploring:
            return tokens
        self._num_guessed = 0
        longest = max(self.costs.prefill_seconds(tokens), longest)
        longer = min(self._safe(tokens, min(seconds, longest)), self.prefill_tokens)
        shorter = max(tokens // 2, min(CHUNK_STEP, tokens))
        can_grow = longer >= LEAST_CONTRAST * tokens
        rarer = min(2 * self._between_exploring, MOST_BETWEEN_EXPLORING)
        self._between_exploring = CHUNKS_BETWEEN_EXPLORING if can_grow else rarer
        self._explored_up = can_grow and not (self._explored_up and shorter < tokens)
        return longer if self._explored_up else shorter

    def _safe(self, tokens: int, seconds: float) -> int:
        """How many tokens take at most `seconds`, whatever share of their costs is the forward's:
        n times the tokens take at most n times as long."""
        growth = MAX_GROWTH
        if tokens and seconds < math.inf:
            growth = min(growth, max(seconds, 0.0) / self.costs.prefill_seconds(tokens))
        return max(tokens, math.floor(growth * tokens + ROUNDING))

    def spend(self, tokens: int) -> None:
        """A step with so many prompt tokens was planned."""
        if tokens and self.costs.known:
            self._credit = max(0.0, self._credit - self.costs.prefill_seconds(tokens))

    def observe(self, timed: Timed) -> None:
        if timed.num_decodes and not timed.num_prefills:
            self._num_mixed = 0
        self.costs.observe(timed)
