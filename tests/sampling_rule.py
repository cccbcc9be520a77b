"""What top_k, top_p and min_p keep by the rule of `sampling/rules.py`: token by token, in numpy.

Masses are given: how a device rounds an exponential is no part of the rule.
"""

from __future__ import annotations

import numpy as np

from pippin.backends.sampling.rules import MASS_UNITS
from pippin.types import SamplingParams

VOCAB = 1000
ROWS = 6
KINDS = ("spread", "peaked", "tied", "masked", "level")
PARAMS = [
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.3, min_p=0.01),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=1 - 2**-24),
    SamplingParams(top_k=200),
    SamplingParams(top_k=VOCAB - 1, top_p=0.999),
    SamplingParams(top_k=333, top_p=0.8, min_p=0.001),
]


def logits(kind: str, num_rows: int = ROWS, vocab: int = VOCAB) -> np.ndarray:
    rng = np.random.default_rng(KINDS.index(kind))
    x = rng.normal(size=(num_rows, vocab)).astype(np.float32)
    match kind:
        case "peaked":
            x *= 12
        case "tied":  # few values, as of logits in 8 bits; both zeros among them
            x = np.round(x * 4) / 4
        case "masked":
            x = np.where(rng.random(x.shape) < 0.7, -np.inf, x * 3).astype(np.float32)
        case "level":
            x[:] = 1.5
    return x


def kept_by_rule(params: SamplingParams, x: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """One row. `mass`: of each token, the likeliest one's is 1."""
    units = [int(m * np.float32(MASS_UNITS)) for m in mass]
    keys = x if params.top_k else mass
    order = np.argsort(-keys, kind="stable")
    first = order[: params.top_k] if params.top_k else order
    total = sum(units[i] for i in first)
    share = np.float32(total) * np.float32(params.top_p)
    needed = max(int(np.ceil(share)), 1) if params.top_p < 1 else total + 1
    above, sums = 0, {}
    for i in first:
        sums.setdefault(float(keys[i]), above)  # of what is truly larger
        above += units[i]
    kept = {key for key, larger in sums.items() if larger < needed}
    return np.array([float(key) in kept for key in keys]) & (mass >= np.float32(params.min_p))
