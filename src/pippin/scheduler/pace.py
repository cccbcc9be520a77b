"""How long steps took, as far as a host can see.

A host sees a step's end if it waits for it. Else it had ended some time before: on CPUs mlx may
hold a launch up until most of its step has run (decode steps are submitted ahead of its limit), and
when that returns the step before has long been done.

    device    |  step 7  |         step 8          |
    host      launch 8 .......................... |  commit 7: when did it end?  |  launch 9 ...
                                     the end of 8, nearly

So the end of a launch that took as long as its step is the step's end. Where neither is seen, the
step is added to the next. A device that waits for a late host does so in the step that was late:
all that steps took is all of the time in which there were some.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property, lru_cache
from statistics import fmean, median

import numpy as np

from pippin.metrics import NOTICEABLE_SECONDS, StepRecord
from pippin.types import GRID

NOTICEABLE_SHARE = 0.05  # of waiting, of the time since the last step was committed: likewise
HELD_UP_SHARE = 0.5  # of a launch, of the time since an end was known: its step held it up


@dataclass
class StepTimes:
    _last_end: float = 0.0
    _last_resumed: float = 0.0
    _unseen: Timed | None = None  # steps since then
    _began: float = 0.0  # of these

    def add(self, record: StepRecord) -> Timed | None:
        """A step that was committed; what it took, with those before it whose end was not seen."""
        dispatched, launched, resumed = record.dispatched, record.launched, record.resumed
        step = Timed(
            0.0,
            record.decode_rows,
            record.prefill_tokens,
            record.drafts,
            record.accepted,
            depth=max([depth for _, depth, _ in record.verified]) if record.verified else 0,
            num_turns=bool(record.own_drafts) != bool(record.drafts_left),
            num_new=record.forwards.new_decode > 0,
        )
        turn = resumed - max(dispatched, self._last_resumed)
        if dispatched >= self._last_resumed:  # nothing was in flight: the device had a pause
            self._unseen, self._last_end = None, dispatched
        self._last_resumed = resumed
        if self._unseen is None:
            self._began = self._last_end
        self._unseen = step if self._unseen is None else self._unseen.followed_by(step)
        if record.waited > max(NOTICEABLE_SECONDS, NOTICEABLE_SHARE * turn):
            end = resumed
        elif launched - dispatched > HELD_UP_SHARE * (launched - self._began) > 0.0:
            end = launched
        else:
            return None
        unseen, self._unseen = self._unseen, None
        self._last_end = end
        unseen.seconds = end - self._began
        return unseen


STEPS_OF_A_KIND = 8  # remembered of steps that are alike,
MAX_KINDS = 16  # of the kinds seen last
HALF_LIFE = 64  # steps after which one counts half,
LEAST_WEIGHT = 0.05  # and at the least so much: what was seen once tells forward and tokens apart
STEPS_BETWEEN_FITS = 4
OUTLIER = 3.0  # a step that took this many times as long as steps like it met a pause,
MAX_OUTLIERS = 8  # unless more follow: then the device has changed its speed
STIFFNESS = 0.02  # how much of a step's evidence it takes to leave what was believed before
UNSURE = 0.02  # a prediction whose relative standard error is larger than this is a guess
LEAST_ERROR = 0.01  # relative, of a step: clocks and devices are no better, whatever a few show
LEAST_COST = 1e-3  # of what the cost would be if nothing else cost anything: none is quite zero
NO_EVIDENCE = 1e-6  # in place of zero: costs that no step tells apart have a huge variance
# A forward's own cost, before anything is known: what this many prompt tokens cost. The bundled
# model on two cores takes 22 ms for 16 tokens, 27 for 32, 38 for 64 and 67 for 128.
FORWARD_TOKENS = 32
ROUNDING = 1e-6  # of a token: what `prefill_seconds` makes of n tokens are n tokens again
EYE = np.eye(5)

Features = tuple[int, int, int, int, int]  # decode steps, rows, forwards, prompt tokens, drafts
Kind = Features


@dataclass
class Timed:
    """A step, or a few in a row of which only the last one's end is known, and what they took."""

    seconds: float
    decode_rows: int  # in all
    prefill_tokens: int  # in all
    drafts: int = 0  # in all,
    accepted: int = 0  # and of these
    depth: int = 0  # of the deepest row of each step
    num_turns: int = 0  # steps in which the device begins to draft, or ends
    num_new: int = 0  # steps of decode rows that were the first of their shape
    num_decodes: int = -1  # steps with rows
    num_prefills: int = -1  # steps with prompts

    def __post_init__(self) -> None:
        if self.num_decodes < 0:
            self.num_decodes, self.num_prefills = self.decode_rows > 0, self.prefill_tokens > 0

    @property
    def features(self) -> Features:
        rows = self.num_decodes, self.decode_rows
        return *rows, self.num_prefills, self.prefill_tokens, self.drafts

    @property
    def kind(self) -> Kind:
        decodes, rows, prefills, tokens, drafts = self.features
        return decodes, size_class(rows), prefills, size_class(tokens), size_class(drafts)

    @property
    def shows_drafts(self) -> bool:
        """Steps with prompts show little of what drafts took, nor does the first of a shape, which
        may be compiled."""
        return self.num_decodes > 0 and not (self.num_prefills or self.num_new or self.seconds <= 0)

    def followed_by(self, other: Timed) -> Timed:
        """Both as one: what a step costs adds up."""
        return Timed(*map(operator.add, astuple(self), astuple(other)))


# Features, the seconds of all of these, and how many steps had been seen.
_Seen = tuple[int, int, int, int, int, float, int]


@dataclass(frozen=True)
class Fit:
    """What steps cost, and how well the steps seen determine it."""

    decode: float
    row: float
    forward: float
    token: float
    draft: float
    evidence: np.ndarray  # float64 [5, 5]: of the costs in units of `scale`, by the steps alone
    scale: np.ndarray  # float64 [5]
    error: float  # of a step's seconds, relative

    def seconds(self, rows: int, tokens: int, drafts: int = 0) -> float:
        decode = self.decode + self.row * rows + self.draft * drafts if rows else 0.0
        return decode + (self.forward + self.token * tokens if tokens else 0.0)

    def is_sure(self, rows: int, tokens: int) -> bool:
        features = np.array(Timed(0.0, rows, tokens).features) * self.scale
        variance = float(features @ self.covariance @ features)
        return variance <= (UNSURE * self.seconds(rows, tokens)) ** 2

    @cached_property
    def covariance(self) -> np.ndarray:
        """Of the costs in units of `scale`. Evidence in these units is about the number of steps,
        so what is inverted has a condition that leaves half of the digits."""
        regular = self.evidence + NO_EVIDENCE * EYE
        return np.asarray(self.error**2 * np.linalg.inv(regular))


LEAST_SEEN = 2  # steps with drafts before they count,
LEAST_PLAIN = 3  # and of those without, which all others are compared with
RECENT = 5  # steps with drafts that are remembered of a depth,
RECENT_PLAIN = 16  # and without
FORGOTTEN = 1024  # steps after which a depth that was not seen again is forgotten
FIRST_SLOPE = 0.05  # of a step, for a draft in each row: before any was seen


@dataclass
class _Point:
    seconds: deque[float]
    seen_at: int = 0
    took: float = 0.0  # the lower quartile: what disturbs a step only makes it longer

    def add(self, seconds: float, seen_at: int) -> None:
        self.seen_at = seen_at
        self.seconds.append(seconds)
        self.took = sorted(self.seconds)[len(self.seconds) // 4]


@dataclass
class CostModel:
    """seconds = [any row] x (decode + row x rows + draft x drafts)
               + [any prompt] x (forward + token x tokens)

    Fitted to steps of all kinds by least squares of relative errors, mixed steps like any others:
    while prompts wait there are no others. The last few of each kind are remembered, for chunks of
    one size alone do not tell what a forward costs from what its tokens do. Steps that met a pause
    of the machine are left out.
    """

    _kinds: OrderedDict[Kind, deque[_Seen]] = field(default_factory=OrderedDict)  # seen last: last
    _num_seen: int = 0
    _num_unfitted: int = 0
    _num_outliers: int = 0  # in a row
    _fit: Fit | None = None
    _depths: dict[int, dict[int, _Point]] = field(default_factory=dict)  # by about so many rows
    _num_plain_or_drafted: int = 0  # steps that show what drafts cost

    @property
    def known(self) -> bool:
        return bool(self._kinds)

    def observe(self, step: Timed) -> None:
        if step.seconds <= 0.0 or not (step.decode_rows or step.prefill_tokens):
            return
        if step.shows_drafts and not step.num_turns:
            self._observe_depth(step)
        kind = step.kind
        alike = self._kinds.get(kind, ())
        if len(alike) >= 3 and step.seconds > OUTLIER * median(seen[5] for seen in alike):
            self._num_outliers += 1
            if self._num_outliers <= MAX_OUTLIERS:
                return
            self._kinds.clear()
        self._num_outliers = 0
        self._num_seen += 1
        self._num_unfitted += 1
        if kind not in self._kinds:
            self._kinds[kind] = deque(maxlen=STEPS_OF_A_KIND)
        self._kinds[kind].append((*step.features, step.seconds, self._num_seen))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def knows_decode(self, rows: int) -> bool:
        """Whether a step of about so many rows, and no prompts, is remembered."""
        alike = Timed(0.0, rows, 0).kind[:-1]
        return any(kind[:-1] == alike for kind in self._kinds)

    @property
    def largest_chunk(self) -> int:
        """Prompt tokens of the longest step that is remembered."""
        kinds = [alike for (_, _, forwards, _, _), alike in self._kinds.items() if forwards]
        return max((seen[3] // seen[2] for alike in kinds for seen in alike), default=0)

    def predicts(self, rows: int, tokens: int) -> bool:
        """Whether the steps seen determine what a step of `rows` and `tokens` would take.

        Chunks of one size do not: their seconds may be the forward's or the tokens'.
        """
        return self._fitted().is_sure(rows, tokens)

    def decode_seconds(self, rows: int, drafts: int = 0) -> float:
        return self._fitted().seconds(rows, 0, drafts)

    def prefill_seconds(self, tokens: int) -> float:
        """Of a step of so many, and no streams; 0 if unknown."""
        return self._fitted().seconds(0, tokens) if self.known else 0.0

    @property
    def productive_tokens(self) -> int:
        """A forward of so many takes as long for its tokens as for being a forward."""
        fit = self._fitted()
        return math.ceil(fit.forward / fit.token)

    def prefill_tokens(self, seconds: float) -> int:
        """How many prompt tokens take `seconds`; 0 if the forward alone takes longer."""
        fit = self._fitted()
        return max(0, math.floor((seconds - fit.forward) / fit.token + ROUNDING))

    def _fitted(self) -> Fit:
        """Fitted when it is asked for, and again after a few more steps; at first after each."""
        enough = STEPS_BETWEEN_FITS if self._num_seen > 4 * STEPS_BETWEEN_FITS else 1
        if self._fit is None or self._num_unfitted >= enough:
            self._num_unfitted = 0
            every = [seen for alike in self._kinds.values() for seen in alike]
            believed = _guess(every[0]) if self._fit is None else self._fit
            self._fit = _least_squares(every, self._num_seen, believed)
        return self._fit

    # ---- drafts: a device's costs have steps and knees, so each depth is measured --------------

    def _observe_depth(self, step: Timed) -> None:
        self._num_plain_or_drafted += 1
        depth, rows = round(step.depth / step.num_decodes), step.decode_rows / step.num_decodes
        points = self._depths.setdefault(size_class(round(rows)), {})
        if depth not in points:
            points[depth] = _Point(deque(maxlen=RECENT if depth else RECENT_PLAIN))
        points[depth].add(step.seconds / step.num_decodes, self._num_plain_or_drafted)

    def _plain_point(self, rows: float) -> _Point | None:
        point = self._depths.get(size_class(round(rows)), {}).get(0)
        return point if point is not None and len(point.seconds) >= LEAST_PLAIN else None

    def plain_seconds(self, rows: float, *, mean: bool = False) -> float | None:
        """Of a step without drafts; None if unknown.

        `mean`: what steps lose or gain in all is compared with that, since a pause of the machine
        meets steps with drafts and without alike.
        """
        point = self._plain_point(rows)
        if point is None:
            return None
        return fmean(point.seconds) if mean else point.took

    def num_since_plain(self, rows: int) -> int:
        """Steps since one without drafts was seen, of about so many rows; more if few were."""
        point = self._depths[size_class(rows)][0]
        return (self._num_plain_or_drafted - point.seen_at) * RECENT_PLAIN // len(point.seconds)

    def deepest_known(self, rows: int) -> int:
        return max(self._shares(size_class(rows)), default=0)

    def depth_seconds(self, rows: int, most: int) -> list[float]:
        """Of steps as deep as 0 to `most`; what they take without drafts is known."""
        plain = self.plain_seconds(rows)
        assert plain is not None
        of_rows = size_class(rows)
        nearest = sorted(self._depths, key=lambda other: (abs(other - of_rows), other))
        known = next((shares for other in nearest if (shares := self._shares(other))), {})
        found, slope = [1.0], FIRST_SLOPE
        for depth in range(1, most + 1):
            next_known = min((other for other in known if other >= depth), default=None)
            if next_known is not None:
                at = depth - 1
                slope = max(0.0, known[next_known] - found[at]) / (next_known - at)
            found.append(found[-1] + slope)
        return [plain * share for share in found]

    def _shares(self, of_rows: int) -> dict[int, float]:
        """Of a step without drafts, by depth: what is known."""
        points = self._depths.get(of_rows, {})
        oldest = self._num_plain_or_drafted - FORGOTTEN
        for depth in [d for d, p in points.items() if d and p.seen_at < oldest]:
            del points[depth]
        if 0 not in points or len(points[0].seconds) < LEAST_PLAIN:
            return {}
        plain = points[0].took
        known = {d: p for d, p in points.items() if d and len(p.seconds) >= LEAST_SEEN}
        return {depth: point.took / plain for depth, point in known.items()}


@lru_cache(maxsize=1024)
def size_class(number: int) -> int:
    """Alike for numbers that differ by less than a fifth."""
    return math.floor(4 * math.log2(number)) if number else -1


def _guess(seen: _Seen) -> Fit:
    """From one step alone: all of its time is spread over what it did."""
    _, rows, _, tokens, drafts, seconds, _ = seen
    token = seconds / (tokens + FORWARD_TOKENS + rows + drafts)
    costs = token * FORWARD_TOKENS / 2, token, token * FORWARD_TOKENS, token, token
    return Fit(*costs, np.zeros((5, 5)), np.array(costs), LEAST_ERROR)


def _least_squares(every: Sequence[_Seen], num_seen: int, believed: Fit) -> Fit:
    """The costs, none negative, that explain what was seen best; each drawn a little to `believed`.

    In units in which each explains the steps alone, so that none is too small to be found again.
    """
    table = np.array(every, dtype=np.float64)
    relative = table[:, :5] / table[:, 5:6]
    weights = np.maximum(0.5 ** ((num_seen - table[:, 6]) / HALF_LIFE), LEAST_WEIGHT)
    weighted = relative * weights[:, None]
    evidence, explained = weighted.T @ relative, weighted.sum(axis=0)
    num_steps = float(weights.sum())
    before = [believed.decode, believed.row, believed.forward, believed.token, believed.draft]
    squares = np.diagonal(evidence)
    scale = np.where(squares > 0.0, np.sqrt(num_steps / np.maximum(squares, 1e-300)), before)
    evidence = evidence * np.outer(scale, scale)
    left = evidence + STIFFNESS * EYE
    right = explained * scale + STIFFNESS * np.array(before) / scale
    costs = np.maximum(_solve_positive(left, right), LEAST_COST) * scale
    errors = relative @ costs - 1.0
    error = math.sqrt(float(weights @ errors**2) / num_steps)
    decode, row, forward, token, draft = costs.tolist()
    return Fit(decode, row, forward, token, draft, evidence, scale, max(error, LEAST_ERROR))


def _solve_positive(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Unknowns that would be negative are zero, and the others are found without them."""
    found = np.linalg.solve(left, right)
    free = found >= 0.0
    while not free.all():
        found = np.zeros(len(right))
        found[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        if (found >= 0.0).all():
            break
        free &= found >= 0.0
    return found


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

    def compute_seconds(self, tokens: int) -> float:
        """What a prompt of so many should take alone, in as many steps as it takes."""
        steps, rest = divmod(tokens, self.prefill_tokens)
        return steps * self.costs.prefill_seconds(self.prefill_tokens) + self.costs.prefill_seconds(
            rest
        )

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
        self._credit = max(0.0, self._credit - self.costs.prefill_seconds(tokens))

    def observe(self, timed: Timed) -> None:
        if timed.num_decodes and not timed.num_prefills:
            self._num_mixed = 0
        self.costs.observe(timed)
