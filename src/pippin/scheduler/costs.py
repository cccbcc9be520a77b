"""What steps cost: learnt from how long they took. Reads no clock, knows no plans and no pace."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

REMEMBERED_STEPS = 64
STEPS_BETWEEN_FITS = 4
OUTLIER = 3.0  # a step that took this many times as long as steps like it met a pause,
MAX_OUTLIERS = 8  # unless it goes on like that: then the device has changed its speed
ALIKE = 1.25  # steps whose rows and tokens differ by no more than this factor
STIFFNESS = 0.02  # how much of a step's evidence it takes to leave what was believed before
# A forward's own cost, before anything is known: what this many prompt tokens cost. The bundled
# model on two cores takes 22 ms for 16 tokens, 27 for 32, 38 for 64 and 67 for 128.
FORWARD_TOKENS = 32


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


@dataclass
class CostModel:
    """seconds = [any row] x (decode + row x rows) + [any prompt] x (forward + token x tokens)

    Fitted to the last steps by least squares of relative errors, mixed steps like any others: while
    prompts wait there are no others. What these steps do not tell apart stays near what was
    believed before. Steps that met a pause of the machine are left out.
    """

    _steps: deque[Timed] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    _num_unfitted: int = 0
    _num_outliers: int = 0  # in a row
    _costs: np.ndarray | None = None  # float64 [4]: decode, row, forward, token

    @property
    def known(self) -> bool:
        return bool(self._steps)

    def observe(self, step: Timed) -> None:
        if step.seconds <= 0.0 or not (step.decode_rows or step.prefill_tokens):
            return
        if self._met_a_pause(step):
            self._num_outliers += 1
            if self._num_outliers <= MAX_OUTLIERS:
                return
            self._steps = deque(
                (s for s in self._steps if not _are_alike(s, step)), maxlen=REMEMBERED_STEPS
            )
        self._num_outliers = 0
        self._steps.append(step)
        self._num_unfitted += 1

    def knows_decode(self, rows: int) -> bool:
        """Whether a step of about so many rows, and no prompts, is remembered."""
        alone = Timed.step(0.0, rows, 0)
        return any(_are_alike(step, alone) for step in self._steps)

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
        enough = STEPS_BETWEEN_FITS if len(self._steps) > REMEMBERED_STEPS // 4 else 1
        if self._costs is None or self._num_unfitted >= enough:
            self._num_unfitted = 0
            self._costs = self._fit()
        return self._costs

    def _met_a_pause(self, step: Timed) -> bool:
        alike = [other.seconds for other in self._steps if _are_alike(step, other)]
        return len(alike) >= 3 and step.seconds > OUTLIER * median(alike)

    def _fit(self) -> np.ndarray:
        features = np.array([_features(step) for step in self._steps], dtype=np.float64)
        seconds = np.array([step.seconds for step in self._steps])
        believed = self._costs if self._costs is not None else _guess(self._steps)
        return _least_squares(features, seconds, believed)


def _are_alike(a: Timed, b: Timed) -> bool:
    pairs = zip(_features(a), _features(b), strict=True)
    return all(max(pair) <= ALIKE * min(pair) for pair in pairs)


def _features(step: Timed) -> tuple[int, int, int, int]:
    return step.num_decodes, step.decode_rows, step.num_prefills, step.prefill_tokens


def _guess(steps: deque[Timed]) -> np.ndarray:
    """From the first step alone: all of its time is spread over what it did."""
    step = steps[0]
    tokens = step.prefill_tokens + FORWARD_TOKENS + step.decode_rows
    token = step.seconds / tokens
    return np.array([token * FORWARD_TOKENS / 2, token, token * FORWARD_TOKENS, token])


def _least_squares(features: np.ndarray, seconds: np.ndarray, believed: np.ndarray) -> np.ndarray:
    """The costs, none negative, that explain `seconds` best; each drawn a little to `believed`."""
    weights = 1.0 / seconds
    scaled = features * weights[:, None] * believed  # unknown: how many times what was believed
    stiffness = STIFFNESS * np.eye(4)
    left = scaled.T @ scaled + stiffness
    right = scaled.T @ np.ones(len(seconds)) + stiffness @ np.ones(4)
    free = np.ones(4, dtype=bool)
    while True:
        factors = np.zeros(4)
        factors[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        if (factors >= 0.0).all():
            break
        free &= factors >= 0.0
    return believed * np.maximum(factors, 1e-3)
