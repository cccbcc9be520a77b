"""A prompt that one backend computed is decoded by another one as if it had computed it itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from builders import Reply, ToyGrammar
from live_peers import LiveDecode, LivePrefill, ask, pair_of, run_until
from pippin.config import EngineConfig, ModelConfig, Speculate
from pippin.messages import Submit, pack_tokens
from pippin.scheduler import admission, memory
from pippin.types import SamplingParams
from processes import is_installed

pytestmark = pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
ENGINE = EngineConfig(memory="600MB", max_running=4, prefill_tokens=128)
PAIRS = [("mlx", "mlx"), ("torch", "torch"), ("torch", "mlx"), ("mlx", "torch")]
OFF: tuple[Speculate, Speculate] = ("off", "off")
# Attention, windows, states and attention in turn, experts: with every pair, and with and without
# speculation. The head of an MTP model drafts, of whose prompt it has seen nothing.
FAMILIES = ("llama", "llama_windows", "qwen3_5", "qwen3_moe", "qwen3_5_moe")
CASES: list[tuple[str, tuple[str, str], tuple[Speculate, Speculate]]] = [
    (name, pair, ("suffix", "suffix") if (row + column) % 2 else OFF)
    for row, name in enumerate(FAMILIES)
    for column, pair in enumerate(PAIRS)
]
CASES += [("qwen3_5_mtp", pair, ("mtp", "mtp")) for pair in PAIRS[:3]]
CASES += [("qwen3_5_mtp", PAIRS[3], ("off", "mtp")), ("qwen3_5_mtp", PAIRS[2], ("off", "auto"))]
SAMPLED = {"temperature": 1.0, "seed": 5}
KINDS = {"greedy": {}, "sampled": SAMPLED, "grammar": SAMPLED}
PROMPT_LEN, REPLY_LEN, PREEMPTED_AT = 300, 16, 5


def model_of(name: str, backend: Any) -> ModelConfig:
    from torch_families import checkpoint

    return ModelConfig(str(checkpoint(name)), backend=backend, dtype="float32")


def make_prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 200, PROMPT_LEN).tolist()


def params_of(kind: str, decode: LiveDecode) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": REPLY_LEN, **KINDS[kind]}
    if "grammar" in kind:
        vocab_size = decode.client.loop.backend.spec.vocab_size
        params["grammar"] = ToyGrammar(modulus=5, vocab_size=vocab_size)
    return params


@cache
def alone(name: str, backend: str) -> LiveDecode:
    """Its prefill engine is never there."""
    return LiveDecode(model_of(name, backend), "tcp://127.0.0.1:1", engine=ENGINE)


@cache
def expected(name: str, backend: str, kind: str) -> list[int]:
    decode = alone(name, backend)
    prompt = make_prompt([*KINDS].index(kind))
    return ask(None, decode, prompt, **params_of(kind, decode)).tokens


def ask_preempted(
    prefill: LivePrefill, decode: LiveDecode, prompt: list[int], **params: Any
) -> Reply:
    """At a moment that depends on no clock."""
    scheduler = decode.client.loop.scheduler
    reply = decode.client.submit(prompt, **params)
    while len(reply.tokens) < PREEMPTED_AT:
        prefill.step()
        decode.client.step()
    (running,) = scheduler.running_slots.values()
    before = scheduler.metrics.preemptions
    scheduler.preempt(running)
    while reply.finish is None:
        prefill.step()
        decode.client.step()
    assert scheduler.metrics.preemptions == before + 1
    return reply


@pytest.mark.parametrize(("name", "pair", "speculate"), CASES)
def test_handed_over_equals_local_without_speculation(
    name: str, pair: tuple[str, str], speculate: tuple[Speculate, Speculate]
) -> None:
    first, second = (model_of(name, backend) for backend in pair)
    engines = [{"engine": replace(ENGINE, speculate=each)} for each in speculate]
    with pair_of(first, decode_model=second, prefill=engines[0], decode=engines[1]) as ends:
        prefill, decode = ends
        loop = decode.client.loop
        if loop.scheduler.speculation is not None:
            loop.scheduler.speculation.policy = None  # it drafts whatever steps take
        for seed, kind in enumerate(KINDS):
            prompt, right = make_prompt(seed), expected(name, pair[1], kind)
            guess = right if speculate[1] == "suffix" else []
            for one in (ask, ask_preempted):  # the second time the prefill engine has it in memory
                reply = one(prefill, decode, prompt, prediction=guess, **params_of(kind, decode))
                assert (reply.cached_tokens, reply.peer_tokens) == (PROMPT_LEN, PROMPT_LEN)
                assert reply.tokens == right, (kind, one)
                if guess and "grammar" not in kind:  # these have no drafts
                    assert reply.accepted_drafts > 0
                loop.flush_cache()
        assert decode.handovers["arrived"] == prefill.pushes["sent"] == 2 * len(KINDS)
        drafted = loop.counters()["metrics"]["drafted_tokens"]
        assert (drafted > 0) == (speculate[1] != "off")


def test_what_was_handed_over_is_preempted_and_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admission, memory):
        monkeypatch.setattr(module, "GROWTH_TOKENS", 4)
    name, pair = "llama", ("torch", "mlx")
    first, second = (model_of(name, backend) for backend in pair)
    engine = {"engine": ENGINE}
    with pair_of(first, decode_model=second, prefill=engine, decode=engine) as (prefill, decode):
        loop = decode.client.loop
        loop.scheduler.budget.capacity = 3 * loop.backend.row_bytes(PROMPT_LEN + 20)
        slots, queue = loop.scheduler.slots, loop.scheduler.admission.queue
        held = [slots.acquire() for _ in range(slots.num_free)]
        prompts = [make_prompt(seed) for seed in range(4)]
        params = {"max_tokens": 200}  # two such rows do not fit
        replies = [decode.client.submit(prompt, **params) for prompt in prompts]
        run_until(lambda: len(queue) == len(prompts), prefill, decode)
        for slot in held:  # all that was handed over is there: as many start as fit
            slots.release(slot)
        run_until(lambda: all(reply.finish for reply in replies), prefill, decode)
        assert loop.scheduler.metrics.preemptions > 0
        assert sum(reply.peer_tokens for reply in replies) >= 2 * PROMPT_LEN
        for reply, prompt in zip(replies, prompts, strict=True):
            assert reply.tokens == ask(None, alone(name, pair[1]), prompt, **params).tokens


def test_the_embedding_of_a_prompt_that_was_handed_over_is_the_local_one() -> None:
    name, prompt = "qwen3_5", make_prompt(9)
    first, second = (model_of(name, backend) for backend in ("torch", "mlx"))
    engine = {"engine": ENGINE}
    with pair_of(first, decode_model=second, prefill=engine, decode=engine) as (prefill, decode):
        vectors = []
        for end in (prefill, None):
            loop = decode.client.loop if end else alone(name, "mlx").client.loop
            loop.submit(
                Submit("vector", pack_tokens(prompt), SamplingParams(max_tokens=1), embeds=True),
                None,
            )
            deltas: list[Any] = []
            while not deltas:
                prefill.step()
                deltas = loop.step()
            (delta,) = deltas
            assert delta.peer_tokens == (PROMPT_LEN if end else 0)
            vectors.append(np.frombuffer(delta.embedding, dtype=np.float32))
        np.testing.assert_allclose(*vectors, rtol=1e-4, atol=1e-4)
        assert decode.handovers["arrived"] == 1
