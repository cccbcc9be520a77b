"""What steps cost: learnt from how long they took. Reads no clock, knows no plans and no pace."""

from __future__ import annotations

import math
import operator
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import median

import numpy as np

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

Features = tuple[int, int, int, int, int]
Kind = Features


@dataclass(frozen=True)
class Timed:
    """A step, or a few in a row of which only the last one's end is known, and what they took."""

    seconds: float
    decode_rows: int  # in all
    prefill_tokens: int  # in all
    num_decodes: int  # steps with rows
    num_prefills: int  # steps with prompts
    drafts: int = 0  # in all,
    accepted: int = 0  # and of these
    depth: int = 0  # of the deepest row of each step
    num_turns: int = 0  # steps in which the device begins to draft, or ends
    num_new: int = 0  # steps of decode rows that were the first of their shape

    @classmethod
    def step(
        cls,
        seconds: float,
        decode_rows: int,
        prefill_tokens: int,
        drafts: int = 0,
        accepted: int = 0,
        depth: int = 0,
        *,
        turns: bool = False,
        is_new: bool = False,
    ) -> Timed:
        has_rows, has_prompts = int(decode_rows > 0), int(prefill_tokens > 0)
        rows = decode_rows, prefill_tokens, has_rows, has_prompts
        return cls(seconds, *rows, drafts, accepted, depth, int(turns), int(is_new))

    def with_seconds(self, seconds: float) -> Timed:
        return replace(self, seconds=seconds)

    def followed_by(self, other: Timed) -> Timed:
        """Both as one: what a step costs adds up."""
        return Timed(*map(operator.add, astuple(self), astuple(other)))


# Of a step: decode steps, rows, forwards, tokens, drafts, the seconds of all of these, and how many
# steps had been seen.
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
        features = np.array(_features(Timed.step(0.0, rows, tokens))) * self.scale
        variance = float(features @ self.covariance @ features)
        return variance <= (UNSURE * self.seconds(rows, tokens)) ** 2

    @cached_property
    def covariance(self) -> np.ndarray:
        """Of the costs in units of `scale`. Evidence in these units is about the number of steps,
        so what is inverted has a condition that leaves half of the digits."""
        regular = self.evidence + NO_EVIDENCE * EYE
        return np.asarray(self.error**2 * np.linalg.inv(regular))


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

    @property
    def known(self) -> bool:
        return bool(self._kinds)

    def observe(self, step: Timed) -> None:
        if step.seconds <= 0.0 or not (step.decode_rows or step.prefill_tokens):
            return
        kind = _kind(step)
        if self._met_a_pause(step, kind):
            self._num_outliers += 1
            if self._num_outliers <= MAX_OUTLIERS:
                return
            self._kinds.clear()
        self._num_outliers = 0
        self._num_seen += 1
        self._num_unfitted += 1
        if kind not in self._kinds:
            self._kinds[kind] = deque(maxlen=STEPS_OF_A_KIND)
        self._kinds[kind].append((*_features(step), step.seconds, self._num_seen))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def knows_decode(self, rows: int) -> bool:
        """Whether a step of about so many rows, and no prompts, is remembered."""
        alike = _kind(Timed.step(0.0, rows, 0))[:-1]
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
        return self._fitted().seconds(0, tokens)

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

    def _met_a_pause(self, step: Timed, kind: Kind) -> bool:
        alike = self._kinds.get(kind, ())
        if len(alike) < 3:
            return False
        return step.seconds > OUTLIER * median(seen[5] for seen in alike)


def _kind(step: Timed) -> Kind:
    decodes, rows, prefills, tokens, drafts = _features(step)
    return decodes, size_class(rows), prefills, size_class(tokens), size_class(drafts)


@lru_cache(maxsize=1024)
def size_class(number: int) -> int:
    """Alike for numbers that differ by less than a fifth."""
    return math.floor(4 * math.log2(number)) if number else -1


def _features(step: Timed) -> Features:
    rows, prompts = (step.num_decodes, step.decode_rows), (step.num_prefills, step.prefill_tokens)
    return *rows, *prompts, step.drafts


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
    num_steps, before = float(weights.sum()), np.array(_costs(believed))
    squares = np.diagonal(evidence)
    scale = np.where(squares > 0.0, np.sqrt(num_steps / np.maximum(squares, 1e-300)), before)
    evidence = evidence * np.outer(scale, scale)
    left = evidence + STIFFNESS * EYE
    right = explained * scale + STIFFNESS * before / scale
    costs = np.maximum(_solve_positive(left, right), LEAST_COST) * scale
    errors = relative @ costs - 1.0
    error = math.sqrt(float(weights @ errors**2) / num_steps)
    decode, row, forward, token, draft = costs.tolist()
    return Fit(decode, row, forward, token, draft, evidence, scale, max(error, LEAST_ERROR))


def _costs(fit: Fit) -> tuple[float, float, float, float, float]:
    return fit.decode, fit.row, fit.forward, fit.token, fit.draft


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
