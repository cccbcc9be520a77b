"""What steps cost: learnt from how long they took. Reads no clock, knows no plans and no pace."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median

import numpy as np

STEPS_OF_A_KIND = 8  # remembered of steps that are alike,
MAX_KINDS = 16  # of the kinds seen last
HALF_LIFE = 64  # steps after which one counts half,
LEAST_WEIGHT = 0.02  # and at the least so much: what was seen once tells forward and tokens apart
STEPS_BETWEEN_FITS = 4
OUTLIER = 3.0  # a step that took this many times as long as steps like it met a pause,
MAX_OUTLIERS = 8  # unless it goes on like that: then the device has changed its speed
STIFFNESS = 0.02  # how much of a step's evidence it takes to leave what was believed before
# A forward's own cost, before anything is known: what this many prompt tokens cost. The bundled
# model on two cores takes 22 ms for 16 tokens, 27 for 32, 38 for 64 and 67 for 128.
FORWARD_TOKENS = 32

Kind = tuple[int, int, int, int]


@dataclass(frozen=True)
class Timed:
    """A step, or a few in a row of which only the last one's end is known, and what they took."""

    seconds: float
    decode_rows: int  # in all
    prefill_tokens: int  # in all
    num_decodes: int  # steps with rows
    num_prefills: int  # steps with prompts

    @classmethod
    def step(cls, seconds: float, decode_rows: int, prefill_tokens: int) -> Timed:
        return cls(
            seconds, decode_rows, prefill_tokens, int(decode_rows > 0), int(prefill_tokens > 0)
        )

    def with_seconds(self, seconds: float) -> Timed:
        return replace(self, seconds=seconds)

    def followed_by(self, other: Timed) -> Timed:
        """Both as one: what a step costs adds up."""
        return Timed(
            self.seconds + other.seconds,
            self.decode_rows + other.decode_rows,
            self.prefill_tokens + other.prefill_tokens,
            self.num_decodes + other.num_decodes,
            self.num_prefills + other.num_prefills,
        )


@dataclass(frozen=True)
class _Seen:
    step: Timed
    number: int  # how many steps had been seen


@dataclass
class CostModel:
    """seconds = [any row] x (decode + row x rows) + [any prompt] x (forward + token x tokens)

    Fitted to steps of all kinds by least squares of relative errors, mixed steps like any others:
    while prompts wait there are no others. The last few of each kind are remembered, for chunks of
    one size alone do not tell what a forward costs from what its tokens do. Steps that met a pause
    of the machine are left out.
    """

    _kinds: OrderedDict[Kind, deque[_Seen]] = field(default_factory=OrderedDict)  # seen last: last
    _num_seen: int = 0
    _num_unfitted: int = 0
    _num_outliers: int = 0  # in a row
    _costs: np.ndarray | None = None  # float64 [4]: decode, row, forward, token

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
        self._kinds[kind].append(_Seen(step, self._num_seen))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)

    def knows_decode(self, rows: int) -> bool:
        """Whether a step of about so many rows, and no prompts, is remembered."""
        return _kind(Timed.step(0.0, rows, 0)) in self._kinds

    def decode_seconds(self, rows: int) -> float:
        costs = self._fitted()
        return float(costs[0] + costs[1] * rows)

    def prefill_seconds(self, tokens: int) -> float:
        costs = self._fitted()
        return float(costs[2] + costs[3] * tokens)

    @property
    def productive_tokens(self) -> int:
        """A forward of so many takes as long for its tokens as for being a forward."""
        costs = self._fitted()
        return math.ceil(float(costs[2] / costs[3]))

    def prefill_tokens(self, seconds: float) -> int:
        """How many prompt tokens take `seconds`; 0 if the forward alone takes longer."""
        costs = self._fitted()
        return max(0, math.floor(float((seconds - costs[2]) / costs[3])))

    def _fitted(self) -> np.ndarray:
        """Fitted when somebody asks, and again after a few more steps; at first after each."""
        enough = STEPS_BETWEEN_FITS if self._num_seen > 4 * STEPS_BETWEEN_FITS else 1
        if self._costs is None or self._num_unfitted >= enough:
            self._num_unfitted = 0
            self._costs = self._fit()
        return self._costs

    def _met_a_pause(self, step: Timed, kind: Kind) -> bool:
        alike = self._kinds.get(kind, ())
        if len(alike) < 3:
            return False
        return step.seconds > OUTLIER * median(seen.step.seconds for seen in alike)

    def _fit(self) -> np.ndarray:
        every = [seen for alike in self._kinds.values() for seen in alike]
        features = np.array([_features(seen.step) for seen in every], dtype=np.float64)
        seconds = np.array([seen.step.seconds for seen in every])
        ages = self._num_seen - np.array([seen.number for seen in every])
        weights = np.maximum(0.5 ** (ages / HALF_LIFE), LEAST_WEIGHT)
        believed = self._costs if self._costs is not None else _guess(every[0].step)
        return _least_squares(features, seconds, weights, believed)


def _kind(step: Timed) -> Kind:
    decodes, rows, prefills, tokens = _features(step)
    return decodes, _size(rows), prefills, _size(tokens)


@lru_cache(maxsize=1024)
def _size(number: int) -> int:
    """Alike for numbers that differ by less than a fifth."""
    return math.floor(4 * math.log2(number)) if number else -1


def _features(step: Timed) -> tuple[int, int, int, int]:
    return step.num_decodes, step.decode_rows, step.num_prefills, step.prefill_tokens


def _guess(step: Timed) -> np.ndarray:
    """From one step alone: all of its time is spread over what it did."""
    tokens = step.prefill_tokens + FORWARD_TOKENS + step.decode_rows
    token = step.seconds / tokens
    return np.array([token * FORWARD_TOKENS / 2, token, token * FORWARD_TOKENS, token])


def _least_squares(
    features: np.ndarray, seconds: np.ndarray, weights: np.ndarray, believed: np.ndarray
) -> np.ndarray:
    """The costs, none negative, that explain `seconds` best; each drawn a little to `believed`."""
    scaled = features / seconds[:, None] * believed  # unknown: how many times what was believed
    weighted = scaled * weights[:, None]
    stiffness = STIFFNESS * np.eye(4)
    left = weighted.T @ scaled + stiffness
    right = weighted.sum(axis=0) + stiffness @ np.ones(4)
    free = np.ones(4, dtype=bool)
    while True:
        factors = np.zeros(4)
        factors[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        if (factors >= 0.0).all():
            break
        free &= factors >= 0.0
    return believed * np.maximum(factors, 1e-3)
