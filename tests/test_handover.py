"""A prompt that one backend computed is decoded by another one as if it had computed it itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from builders import Reply, ToyGrammar
from live_peers import LiveDecode, ask, ask_all, pair_of
from pippin.config import EngineConfig, ModelConfig
from pippin.config.engine import Speculate
from pippin.scheduler.memory import claims
from pippin.scheduler.planning import admission
from processes import is_installed

pytestmark = pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
ENGINE = EngineConfig(memory="600MB", max_running=4, prefill_tokens=128)
PAIRS = [("mlx", "mlx"), ("torch", "torch"), ("torch", "mlx"), ("mlx", "torch")]
CASES = [("qwen3_5", pair) for pair in PAIRS]  # states and attention in turn
CASES += [("llama_windows", pair) for pair in PAIRS[1:3]] + [("llama", PAIRS[2])]
CASES += [("qwen3_5_moe", PAIRS[2]), ("qwen3_moe", PAIRS[1])]
SPECULATING = [("qwen3_5", PAIRS[2], "suffix"), ("llama_windows", PAIRS[1], "suffix")]
SPECULATING += [("llama", PAIRS[2], "suffix"), ("qwen3_moe", PAIRS[2], "suffix")]
SPECULATING += [("qwen3_5_moe", PAIRS[1], "suffix"), ("qwen3_5_mtp", PAIRS[2], "auto")]
SPECULATING += [("qwen3_5_mtp", PAIRS[1], "mtp")]
SAMPLED = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
PROMPT_LEN = 300


def model_of(name: str, backend: Any) -> ModelConfig:
    from torch_families import checkpoint

    return ModelConfig(str(checkpoint(name)), backend=backend, dtype="float32")


def make_prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 200, PROMPT_LEN).tolist()


@cache
def alone(name: str, backend: str) -> LiveDecode:
    """Its prefill engine is never there."""
    return LiveDecode(model_of(name, backend), "tcp://127.0.0.1:1", engine=ENGINE)


def expected(name: str, backend: str, prompt: list[int], **kwargs: Any) -> Reply:
    return ask(None, alone(name, backend), prompt, **kwargs)


@pytest.mark.parametrize(("name", "pair"), CASES)
def test_handed_over_equals_local(name: str, pair: tuple[str, str]) -> None:
    first, second = (model_of(name, backend) for backend in pair)
    engine = {"engine": ENGINE}
    with pair_of(first, decode_model=second, prefill=engine, decode=engine) as (prefill, decode):
        kinds: list[dict[str, Any]] = [{"max_tokens": 12}, SAMPLED]
        for seed, params in enumerate(kinds):
            prompt = make_prompt(seed)
            reply = ask(prefill, decode, prompt, **params)
            assert (reply.cached_tokens, reply.peer_tokens) == (PROMPT_LEN, PROMPT_LEN)
            assert reply.tokens == expected(name, pair[1], prompt, **params).tokens
        grammar = [ToyGrammar(modulus=5, vocab_size=vocab_of(decode)) for _ in range(2)]
        prompt = make_prompt(7)
        reply = ask(prefill, decode, prompt, grammar=grammar[0], max_tokens=12)
        assert reply.peer_tokens == PROMPT_LEN
        local = expected(name, pair[1], prompt, grammar=grammar[1], max_tokens=12)
        assert reply.tokens == local.tokens
        assert decode.client.loop.counters()["metrics"]["computed_tokens"] == 0
        assert decode.handovers["arrived"] == prefill.pushes["sent"] == 3


@pytest.mark.parametrize("pair", PAIRS[1:3])
def test_a_reply_with_drafts_goes_on_behind_what_was_handed_over(pair: tuple[str, str]) -> None:
    """The head that drafts has seen nothing of the prompt."""
    name = "qwen3_5_mtp"
    first, second = (model_of(name, backend) for backend in pair)
    with pair_of(
        first,
        decode_model=second,
        prefill={"engine": ENGINE},
        decode={"engine": replace(ENGINE, speculate="mtp")},
    ) as (prefill, decode):
        for seed, params in enumerate([{"max_tokens": 16}, SAMPLED]):
            prompt = make_prompt(seed)
            reply = ask(prefill, decode, prompt, **params)
            assert reply.peer_tokens == PROMPT_LEN
            assert reply.tokens == expected(name, pair[1], prompt, **params).tokens
        assert decode.client.loop.counters()["metrics"]["drafted_tokens"] > 0


@pytest.mark.parametrize(("name", "pair", "speculate"), SPECULATING)
def test_handed_over_with_speculation_at_both_ends_equals_local_without(
    name: str, pair: tuple[str, str], speculate: Speculate
) -> None:
    first, second = (model_of(name, backend) for backend in pair)
    engine = {"engine": replace(ENGINE, speculate=speculate)}
    with pair_of(first, decode_model=second, prefill=engine, decode=engine) as (prefill, decode):
        kinds: list[dict[str, Any]] = [{}, SAMPLED, {"grammar": True}]
        for seed, kind in enumerate(kinds):
            params = kind | {"max_tokens": 24}
            prompt = make_prompt(seed)
            if "grammar" in kind:  # one for each request
                grammars = [ToyGrammar(modulus=5, vocab_size=vocab_of(decode)) for _ in range(2)]
                params, local = ({**params, "grammar": grammar} for grammar in grammars)
            else:
                local = params
            right = expected(name, pair[1], prompt, **local).tokens
            reply = ask(prefill, decode, prompt, prediction=right, **params)
            assert reply.peer_tokens == PROMPT_LEN
            assert reply.tokens == right
            if speculate == "suffix" and not kind:
                assert reply.accepted_drafts > 0
        assert decode.client.loop.counters()["metrics"]["drafted_tokens"] > 0


def test_what_was_handed_over_is_preempted_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admission, claims):
        monkeypatch.setattr(module, "GROWTH_TOKENS", 4)
    name, pair = "llama", ("torch", "mlx")
    first, second = (model_of(name, backend) for backend in pair)
    engine = {"engine": ENGINE}
    with pair_of(first, decode_model=second, prefill=engine, decode=engine) as (prefill, decode):
        loop = decode.client.loop
        loop.scheduler.budget.capacity = 3 * loop.backend.row_bytes(PROMPT_LEN + 20)
        prompts = [make_prompt(seed) for seed in range(4)]
        params = {"max_tokens": 80}
        replies = ask_all(prefill, decode, prompts, **params)
        assert loop.scheduler.metrics.preemptions > 0
        assert sum(reply.peer_tokens for reply in replies) >= 2 * PROMPT_LEN
        for reply, prompt in zip(replies, prompts, strict=True):
            assert reply.tokens == expected(name, pair[1], prompt, **params).tokens


@pytest.mark.parametrize("speculate", ["off", "suffix"])
@pytest.mark.parametrize("name", ["llama", "llama_windows", "qwen3_5", "qwen3_moe"])
def test_a_reply_that_is_preempted_goes_on_behind_what_was_handed_over(
    name: str, speculate: Speculate
) -> None:
    """At a moment that depends on no clock."""
    pair = ("torch", "mlx")
    first, second = (model_of(name, backend) for backend in pair)
    engine = {"engine": replace(ENGINE, speculate=speculate)}
    with pair_of(first, decode_model=second, prefill=engine, decode=engine) as (prefill, decode):
        scheduler = decode.client.loop.scheduler
        for seed, params in enumerate([{"max_tokens": 40}, {**SAMPLED, "max_tokens": 40}]):
            prompt = make_prompt(seed)
            right = expected(name, pair[1], prompt, **params).tokens
            guess = right if speculate == "suffix" else []
            reply = decode.client.submit(prompt, prediction=guess, **params)
            while len(reply.tokens) < 5:
                prefill.step()
                decode.client.step()
            (running,) = scheduler.running_slots.values()
            scheduler.registry.preempt(running)
            while reply.finish is None:
                prefill.step()
                decode.client.step()
            assert reply.peer_tokens == PROMPT_LEN
            assert reply.tokens == right
        assert scheduler.metrics.preemptions == 2
        assert (scheduler.metrics.drafted_tokens > 0) == (speculate != "off")


def vocab_of(decode: LiveDecode) -> int:
    return decode.client.loop.backend.spec.vocab_size
