"""`--speculate`: replies are those without drafts, in fewer steps; each way has its drafters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from bundled import BUNDLED_PATH
from families import CONFIGS
from oracle_drafter import OracleDrafter
from pippin import LLM, SamplingParams
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine import build_loop
from pippin.errors import ConfigError, LoadError, RequestError
from pippin.offline.llm import Completion
from pippin.scheduler.request import Request
from shared import engine_beside
from torch_families import weights

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


PLAIN = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DOG = "Once upon a time there was a little dog named Max. He had a red ball. " * 3
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
    prompts = [f"{DOG} The {name}" for name in FEATURES]
    params = [replace(PLAIN, **fields) for fields in FEATURES.values()]
    replies = iter(engine.generate(prompts, params))
    assert engine.loop.scheduler.compiler is not None
    engine.loop.scheduler.compiler.close()  # not the backend, which others share
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
    vectors = engine_beside(llm, speculate="off").embed(["A fox.", DOG])
    engine = make_engine(llm, "auto", {})
    stream = engine.stream_generate(prompt, PLAIN)
    text = next(stream)
    np.testing.assert_allclose(engine.embed(["A fox.", DOG]), vectors, atol=1e-4)
    assert text + "".join(stream) == expected.text
    assert engine.metrics.drafted_tokens > 0


pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")


MAX = "Once upon a time there was a little dog named Max. He had a red ball."
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture
def draft(tmp_path: Path) -> str:
    """A small random model that spells as the bundled one does."""
    config = CONFIGS["llama"] | {"vocab_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights(config), tmp_path / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_PATH / name, tmp_path)
    return str(tmp_path)


@pytest.mark.parametrize("backend", ["torch"])
def test_replies_are_the_same_and_drafts_are_counted(backend: str, draft: str) -> None:
    model = ModelConfig(backend=backend, dtype="float32")  # type: ignore[arg-type]
    engine = EngineConfig(draft_model=draft, memory="1GB", max_running=4)
    with LLM(config=Config(model=model, engine=engine)) as llm:
        assert llm.metrics.drafters.keys() == {"draft"}
        assert engine_beside(llm, speculate="auto").metrics.drafters.keys() == {"draft", "suffix"}
        without = engine_beside(llm, speculate="off")
        speculation = llm.loop.scheduler.speculation
        assert speculation is not None
        speculation.policy = None
        for params in (GREEDY, replace(GREEDY, temperature=0.8, seed=3)):
            (found,), (expected,) = llm.generate(MAX, params), without.generate(MAX, params)
            assert found.tokens == expected.tokens
        assert llm.metrics.drafters["draft"].rows > 0
