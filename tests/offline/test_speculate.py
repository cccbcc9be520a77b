"""`speculate` as a user has it: the same replies in fewer steps; off by default, and by request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pippin import LLM, SamplingParams
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine import build_loop
from pippin.errors import ConfigError, LoadError, RequestError

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


@pytest.mark.parametrize("model", [TOY, ModelConfig(dtype="float32")], ids=["toy", "bundled"])
def test_replies_are_the_same_in_fewer_steps(model: ModelConfig) -> None:
    sampled = replace(REPLY, temperature=0.8, seed=5)
    expected, steps = None, 0
    for speculate, always in ((False, False), (True, True), (True, False)):
        with make_llm(model, speculate=speculate, always=always) as llm:
            found = [llm.generate(STORY, params) for params in (REPLY, sampled, REPLY, sampled)]
            replies = [completion.tokens for (completion,) in found]
            expected, steps = expected or replies, steps or llm.metrics.steps
            assert replies == expected
            assert speculate or not llm.metrics.drafted_tokens
            if always:
                assert llm.metrics.accepted_tokens > 80, "the third and fourth reply were known"
                assert llm.metrics.summary()["accepted_tokens"] == llm.metrics.accepted_tokens
                assert llm.metrics.steps < 0.8 * steps


def test_a_reply_that_is_predicted_takes_fewer_steps() -> None:
    with make_llm(TOY, speculate=True) as llm:
        (first,) = llm.generate(STORY, replace(REPLY, speculate=False), cache_salt="a")
        steps = llm.metrics.steps
        for number, prediction in enumerate(
            [first.tokens, llm.text.tokenizer.decode(first.tokens)]
        ):
            (reply,) = llm.generate(
                STORY, REPLY, predictions=[prediction], cache_salt=f"salt {number}"
            )
            assert reply.tokens == first.tokens
            if number == 0:
                assert reply.accepted_drafts > 50
                assert llm.metrics.steps - steps < 40
        with pytest.raises(RequestError, match="predictions has 2 values for 1 prompts"):
            llm.generate(STORY, REPLY, predictions=["a", "b"])
        with pytest.raises(RequestError, match="predictions is a list of 1 integers"):
            llm.generate(STORY, REPLY, predictions=[[-1]])


def test_mtp_is_refused_where_nothing_verifies_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_loop, "MAX_DEPTH", 0)
    with pytest.raises(LoadError, match="speculate is mtp, and this backend verifies no drafts"):
        LLM(config=Config(model=TOY, engine=EngineConfig(speculate="mtp")))


def test_mtp_is_refused_where_there_is_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    load = build_loop.load_backend

    def without_head(*args: Any) -> Any:
        backend: Any = load(*args)
        backend.drafts_itself = 0
        return backend

    monkeypatch.setattr(build_loop, "load_backend", without_head)
    with pytest.raises(LoadError, match="the checkpoint has no MTP head that this backend can run"):
        LLM(config=Config(model=TOY, engine=EngineConfig(speculate="mtp")))


@pytest.mark.parametrize(
    ("speculate", "drafters"),
    [("auto", {"suffix", "mtp"}), ("suffix", {"suffix"}), ("mtp", {"mtp"}), ("off", set())],
)
def test_each_way_to_speculate_has_its_drafters(speculate: Any, drafters: set[str]) -> None:
    with LLM(config=Config(model=TOY, engine=EngineConfig(speculate=speculate))) as llm:
        assert llm.metrics.drafters.keys() == drafters
        speculation = llm.loop.scheduler.speculation
        if speculation is not None:
            speculation.policy = None
        (reply,) = llm.generate(STORY, REPLY)
        assert len(reply.tokens) == 80
        assert bool(reply.accepted_drafts) == ("mtp" in drafters)


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
