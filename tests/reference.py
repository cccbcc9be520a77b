"""Plain mlx-lm as a reference: a second, untouched instance of a model scores whole sequences.

A sequence goes through the model in one forward, with mlx-lm's own caches, so a reply is judged
token by token given what it said itself. Knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from bundled import BUNDLED_PATH
from families import build
from near_ties import TOLERANCE, assert_best, assert_top, log_softmax
from pippin.types import TokenLogprobs

BUNDLED = "bundled"


@cache
def plain_model(name: str) -> nn.Module:
    """A family of families.py, or the bundled model in float32."""
    if name != BUNDLED:
        return build(name)[0]
    model, _ = load_model(BUNDLED_PATH)
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    return model


@cache
def score(name: str, tokens: tuple[int, ...]) -> np.ndarray:
    """Log probabilities [tokens, vocab] of what may follow each token, given all before it."""
    model = plain_model(name)
    return log_softmax(np.array(model(mx.array([tokens]), cache=make_prompt_cache(model))[0]))


def assert_right(
    name: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprobs] = (),
) -> None:
    """Each token is the best that the plain model could say there, and so scored."""
    rows = score(name, (*prompt, *tokens[:-1]))[len(prompt) - 1 :]
    assert_best(tokens, rows)
    for token, scored, row in zip(tokens, logprobs, rows, strict=False):
        values = [scored.logprob, *scored.top_logprobs]
        np.testing.assert_allclose(values, row[[token, *scored.top_ids]], rtol=0, atol=TOLERANCE)
        assert_top(scored.top_ids, row)
