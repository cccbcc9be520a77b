"""`speculate` as a user has it: the same replies in fewer steps; off by default, and by request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pippin import LLM, SamplingParams
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import ConfigError

TOY = ModelConfig(backend="fake")
REPLY = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
STORY = "Once upon a time there was a little dog named Max. He had a red ball. " * 4


def make_llm(model: ModelConfig, *, speculate: bool, always: bool = True) -> LLM:
    """`always`: whatever it costs, which depends on the machine."""
    engine = EngineConfig(speculate="suffix" if speculate else "off", memory="2GB")
    llm = LLM(config=Config(model=model, engine=engine))
    speculation = llm.loop.scheduler.speculation
    assert (speculation is not None) == speculate
    if speculation is not None and always:
        speculation.policy = None
    return llm


@pytest.mark.parametrize("always", [True, False], ids=["always", "where it pays"])
@pytest.mark.parametrize("model", [TOY, ModelConfig(dtype="float32")], ids=["toy", "bundled"])
def test_replies_are_the_same_in_fewer_steps(model: ModelConfig, always: bool) -> None:
    sampled = replace(REPLY, temperature=0.8, seed=5)
    replies, steps = [], []
    for speculate in (False, True):
        with make_llm(model, speculate=speculate, always=always) as llm:
            found = [llm.generate(STORY, params) for params in (REPLY, sampled, REPLY, sampled)]
            replies.append([completion.tokens for (completion,) in found])
            steps.append(llm.metrics.steps)
            assert speculate or not llm.metrics.drafted_tokens
            if always and speculate:
                assert llm.metrics.accepted_tokens > 80, "the third and fourth reply were known"
                assert llm.metrics.summary()["accepted_tokens"] == llm.metrics.accepted_tokens
    assert replies[0] == replies[1]
    assert steps[1] < 0.8 * steps[0] or not always


def test_a_request_may_ask_for_one_token_a_step() -> None:
    with make_llm(TOY, speculate=True) as llm:
        for _ in range(2):
            llm.generate(STORY, replace(REPLY, speculate=False))
        assert not llm.metrics.drafted_tokens
        llm.generate(STORY, REPLY)
        assert llm.metrics.accepted_tokens > 40


def test_deterministic_engines_do_not_speculate() -> None:
    with pytest.raises(ConfigError, match="remove --speculate or --deterministic"):
        EngineConfig(speculate="suffix", deterministic=True)
