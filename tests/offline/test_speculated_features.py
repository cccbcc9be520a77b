"""Each feature of a request beside rows with drafts: the same replies as without drafts, on the
bundled model in float32. What a device cannot verify has no drafts, and others beside it have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracle_drafter import OracleDrafter
from pippin import LLM, SamplingParams
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.offline.llm import Completion
from pippin.scheduler.request import Request
from shared import engine_beside

PLAIN = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
STORY = "Once upon a time there was a little dog named Max. He had a red ball. " * 3
DRAFTS = ("oracle", "suffix", "auto")
AT_DEPTH_0: dict[str, dict[str, Any]] = {  # a row with it has no drafts
    "grammar": {"regex": "[a-z]+( [a-z]+){8}", "ignore_eos": False},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logprobs": {"logprobs": 3},
    "many stop ids": {"stop_token_ids": tuple(range(20, 40))},
    "speculate": {"speculate": False},
}
WITH_DRAFTS: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 15, "ignore_eos": False, "stop_token_ids": (5, 6, 7, 8)},
    "stop strings": {"stop": (" ball", " day")},
    "n": {"n": 3, "temperature": 0.9, "seed": 3},
    "seed": {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 11},
    "logit_bias": {"logit_bias": {100: 4.0, 200: -100.0}},
    "prompt_logprobs": {"prompt_logprobs": 1},
}
FEATURES = {"nothing": {}, **AT_DEPTH_0, **WITH_DRAFTS}
Replies = dict[str, list[Completion]]  # by feature


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = EngineConfig(speculate="auto", memory="2GB")
    with LLM(config=Config(model=ModelConfig(dtype="float32"), engine=engine)) as llm:
        yield llm


def make_engine(llm: LLM, drafts: str, known: dict[tuple[int, ...], list[int]]) -> LLM:
    """That has drafts in every step, whatever they cost."""
    engine = engine_beside(llm, speculate="suffix" if drafts == "suffix" else "auto")
    speculation = engine.loop.scheduler.speculation
    assert speculation is not None
    speculation.policy = None
    if drafts == "oracle":

        def reply_of(request: Request) -> Sequence[int]:
            return known.get(tuple(request.prompt.tolist()), ())

        vocab_size = llm.loop.backend.spec.vocab_size
        speculation.drafter, speculation.device = OracleDrafter(reply_of, 0.8, vocab_size), None
        engine.metrics.drafters.update(speculation.no_counts)
    return engine


def replies_of(engine: LLM) -> Replies:
    """Rows with all features in one batch."""
    prompts = [f"{STORY} The {name}" for name in FEATURES]
    params = [replace(PLAIN, **fields) for fields in FEATURES.values()]
    replies = iter(engine.generate(prompts, params))
    return {
        name: [next(replies) for _ in range(p.n)] for name, p in zip(FEATURES, params, strict=True)
    }


@pytest.fixture(scope="module")
def without(llm: LLM) -> Replies:
    return replies_of(engine_beside(llm, speculate="off"))


@pytest.fixture(scope="module")
def with_drafts(llm: LLM, without: Replies) -> dict[str, Replies]:
    known = {tuple(one.prompt_tokens): one.tokens for some in without.values() for one in some}
    return {drafts: replies_of(make_engine(llm, drafts, known)) for drafts in DRAFTS}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("feature", FEATURES)
def test_replies_are_those_without_drafts(
    without: Replies, with_drafts: dict[str, Replies], feature: str, drafts: str
) -> None:
    replies, expected = with_drafts[drafts][feature], without[feature]
    for reply, other in zip(replies, expected, strict=True):
        assert (reply.tokens, reply.text) == (other.tokens, other.text)
        assert reply.finish_reason == other.finish_reason
        for scored, wanted in zip(reply.logprobs or [], other.logprobs or [], strict=True):
            assert scored.top_ids == wanted.top_ids
            assert scored.logprob == pytest.approx(wanted.logprob, abs=1e-3)
    num_drafts = sum(reply.accepted_drafts + reply.rejected_drafts for reply in replies)
    if feature in AT_DEPTH_0:
        assert num_drafts == 0
    elif drafts != "suffix":
        assert num_drafts > 0


def test_embeddings_beside_rows_with_drafts(llm: LLM, without: Replies) -> None:
    (expected,) = without["nothing"]
    prompt = expected.prompt_tokens
    vectors = engine_beside(llm, speculate="off").embed(["A fox.", STORY])
    engine = make_engine(llm, "auto", {})
    stream = engine.stream_generate(prompt, PLAIN)
    text = next(stream)
    np.testing.assert_allclose(engine.embed(["A fox.", STORY]), vectors, atol=1e-4)
    assert text + "".join(stream) == expected.text
    assert engine.metrics.drafted_tokens > 0
