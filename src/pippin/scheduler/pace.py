"""How many prompt tokens a step may compute so that running streams keep their pace.

Knows what steps cost, as they tell it; knows no requests and reads no clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from pippin.types import GRID

STEP_STRETCH = 2.6  # a step with one prompt in it may take this many times a decode-only step,
LONGEST_STRETCH = 5.0  # and up to this many the more other prompts wait for each stream that runs
SMALLEST_CHUNK = GRID // 2
REMEMBERED_STEPS = 64
STEPS_BETWEEN_FITS = 4
STEPS_BETWEEN_RESTS = 32  # a step without prompts now and then tells the two costs apart,
LARGEST_SAVED = 8 * GRID  # tokens to save up for: streams wait for all of them at once
MAX_SAVING_STEPS = 32  # without prompts, before a forward that streams cannot pay for runs anyway
STEPS_BEFORE_REST = 4  # and so many after the number of streams has changed
OUTLIER = 3.0  # a step that took this many times as long as steps like it met a pause,
MAX_OUTLIERS = 8  # unless it goes on like that: then the device has changed its speed
ALIKE = 1.25  # steps whose rows and tokens differ by no more than this factor
STIFFNESS = 0.02  # how much of a step's evidence it takes to leave what was believed before
# A forward's own cost, before anything is known: what this many prompt tokens cost. The bundled
# model on two cores takes 22 ms for 16 tokens, 27 for 32, 38 for 64 and 67 for 128.
FORWARD_TOKENS = 32


@dataclass(frozen=True)
class Step:
    seconds: float
    decode_rows: int
    prefill_tokens: int


@dataclass
class CostModel:
    """seconds = [any row] x (decode + row x rows) + [any prompt] x (forward + token x tokens)

    Fitted to the last steps by least squares of relative errors, mixed steps like any others: while
    prompts wait there are no others. What these steps do not tell apart stays near what was
    believed before. Steps that met a pause of the machine are left out.
    """

    _steps: deque[Step] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))
    _num_unfitted: int = 0
    _num_outliers: int = 0  # in a row
    _costs: np.ndarray | None = None  # float64 [4]: decode, row, forward, token

    @property
    def known(self) -> bool:
        return bool(self._steps)

    def observe(self, step: Step) -> None:
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
        alone = Step(0.0, rows, 0)
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

    def _met_a_pause(self, step: Step) -> bool:
        alike = [other.seconds for other in self._steps if _are_alike(step, other)]
        return len(alike) >= 3 and step.seconds > OUTLIER * median(alike)

    def _fit(self) -> np.ndarray:
        features = np.array([_features(step) for step in self._steps], dtype=np.float64)
        seconds = np.array([step.seconds for step in self._steps])
        believed = self._costs if self._costs is not None else _guess(self._steps)
        return _least_squares(features, seconds, believed)


def _are_alike(a: Step, b: Step) -> bool:
    pairs = ((a.decode_rows, b.decode_rows), (a.prefill_tokens, b.prefill_tokens))
    return all(max(pair) <= ALIKE * min(pair) for pair in pairs)


def _features(step: Step) -> tuple[float, float, float, float]:
    decodes, prefills = float(step.decode_rows > 0), float(step.prefill_tokens > 0)
    return decodes, float(step.decode_rows), prefills, float(step.prefill_tokens)


def _guess(steps: deque[Step]) -> np.ndarray:
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


@dataclass
class Pace:
    """Bounds what prompts take from running streams.

    Without running streams a step takes `prefill_tokens`. With them prompts may take so much time
    that a step becomes `STEP_STRETCH` times as long, more where many wait and few run. A forward
    of a few tokens holds streams up almost as long as one of many: where that time does not pay
    for a productive one, it is saved up over steps without prompts.

        tokens dominate (CPUs):       |d pp|d pp|d pp|d pp|
        forwards dominate (GPUs):     |d|d|d|d|d|d pppppppp|d|d|d|d|
    """

    prefill_tokens: int
    costs: CostModel = field(default_factory=CostModel)
    _num_mixed: int = STEPS_BETWEEN_RESTS  # steps since streams last had one to themselves
    _credit: float = math.inf  # seconds that prompts may take

    def budget(self, num_streams: int, num_prompts: int = 1) -> int:
        """Prompt tokens of the next step, where `num_prompts` wait for some: 0 for a rest.

        What is used of them is told by `spend`.
        """
        if num_streams == 0:
            return self.prefill_tokens
        self._num_mixed += 1
        known = self.costs.knows_decode(num_streams)
        if self._num_mixed > (STEPS_BETWEEN_RESTS if known else STEPS_BEFORE_REST):
            self._num_mixed = 0
            return 0
        if not self.costs.known:
            return min(GRID, self.prefill_tokens)
        stretch = min(STEP_STRETCH * (1.0 + (num_prompts - 1) / num_streams), LONGEST_STRETCH)
        income = (stretch - 1.0) * self.costs.decode_seconds(num_streams)
        productive = min(self.costs.productive_tokens, LARGEST_SAVED)
        least = min(max(productive, SMALLEST_CHUNK), self.prefill_tokens)
        price = self.costs.prefill_seconds(least)
        self._credit = min(self._credit + income, max(income, price))
        if self._credit < price and income < price and self._can_save(income, price):
            return 0
        return min(max(self.costs.prefill_tokens(self._credit), least), self.prefill_tokens)

    def spend(self, tokens: int) -> None:
        """A step with so many prompt tokens was planned."""
        if tokens and self.costs.known:
            self._credit = max(0.0, self._credit - self.costs.prefill_seconds(tokens))

    @staticmethod
    def _can_save(income: float, price: float) -> bool:
        return price <= MAX_SAVING_STEPS * income

    def observe(self, *, seconds: float, prefill_tokens: int, decode_rows: int) -> None:
        if decode_rows and not prefill_tokens:
            self._num_mixed = 0
        self.costs.observe(Step(seconds, decode_rows, prefill_tokens))
