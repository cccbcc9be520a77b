"""Every model module of mlx-lm: served as mlx-lm itself computes it, or refused with a reason.

One small model of each, asked alone, in a batch of uneven rows, and again with warm prefixes. The
reference is a second, untouched instance of the model.
"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from builders import Client, Reply
from every_family import EVERY, METAL_ONLY, UNTRIED
from families import CONFIGS, VOCAB
from near_ties import TOLERANCE, assert_best, assert_top, log_softmax
from pippin.backends.mlx.load import load, prepare
from pippin.backends.mlx.refusals import REASONS
from pippin.errors import UnsupportedLayout
from serving import check_idle, make_client
from small_models import build_from

pytestmark = pytest.mark.slow

MODULES = Path(mlx_lm.models.__path__[0])


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(2, VOCAB, num_tokens).tolist()
    return tokens


def ask(client: Client, *prompts: list[int]) -> list[Reply]:
    replies = [client.submit(p, max_tokens=4, temperature=0.0, logprobs=3) for p in prompts]
    client.run()
    return replies


@pytest.mark.parametrize("family", EVERY)
def test_alone_in_a_batch_and_warm_a_family_says_what_mlx_lm_says(family: str) -> None:
    config = EVERY[family]
    client = make_client(family, model=prepare(build_from(config), config), chunk=64, num_slots=4)
    short, long = make_prompt(30, seed=0), make_prompt(94, seed=1)  # replies end windows and blocks
    (alone,) = ask(client, short)
    batch = ask(client, long, make_prompt(61, seed=2), make_prompt(5, seed=3))
    turn = [*short, *alone.tokens, *make_prompt(2, seed=4)]
    warm = ask(client, [*long[:66], *make_prompt(3, seed=5)], turn, long)
    check_idle(client)
    assert all(reply.cached_tokens for reply in warm)
    plain = build_from(config)
    for reply in (alone, *batch, *warm):
        tokens = mx.array([[*reply.prompt, *reply.tokens[:-1]]])
        logits = np.array(plain(tokens, cache=make_prompt_cache(plain))[0])
        rows = log_softmax(logits)[len(reply.prompt) - 1 :]
        assert_best(reply.tokens, rows)
        for scored, row in zip(reply.logprobs, rows, strict=True):
            expected = row[list(scored.top_ids)]
            np.testing.assert_allclose(scored.top_logprobs, expected, rtol=0, atol=TOLERANCE)
            assert_top(scored.top_ids, row)


def test_every_module_of_mlx_lm_is_served_or_refused() -> None:
    modules = {
        path.stem
        for path in MODULES.glob("*.py")
        if "class ModelArgs" in path.read_text() and path.stem != "base"
    }
    tried = {str(config["model_type"]) for config in (*CONFIGS.values(), *EVERY.values())}
    assert modules == tried | set(REASONS) | set(METAL_ONLY) | UNTRIED
    assert not tried & set(REASONS)


@pytest.mark.parametrize("family", METAL_ONLY)
@pytest.mark.skipif(mx.metal.is_available(), reason="this device has what these families need")
def test_a_family_with_kernels_for_metal_alone_is_refused_elsewhere(family: str) -> None:
    with pytest.raises(UnsupportedLayout, match=f"{family} models.* fails here: .*No Metal"):
        prepare(build_from(METAL_ONLY[family]), METAL_ONLY[family])


@pytest.mark.parametrize("family", REASONS)
def test_a_refused_family_is_named_before_mlx_lm_reads_anything(
    family: str, tmp_path: Path
) -> None:
    """mlx-lm's module for OLMo would end the process."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UnsupportedLayout, match=f"^{family} models are not served: [a-z]"):
        load(tmp_path)
