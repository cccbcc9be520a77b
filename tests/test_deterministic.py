"""`--deterministic`: the same bits cold and warm, alone and in a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from pippin.config import EngineConfig
from pippin.offline.llm import LLM, Completion
from pippin.types import GRID, SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=70, temperature=0.0, logprobs=5, ignore_eos=True)
SHORT = replace(GREEDY, max_tokens=34)
WORDS = "Once there was a small dog who liked to dig holes in the garden and sleep in the sun. "


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(engine=EngineConfig(deterministic=True))


@dataclass(frozen=True)
class Bits:
    """Everything a reply says, down to the last bit of its log probabilities."""

    tokens: list[int]
    logprobs: list[tuple[float, tuple[int, ...], tuple[float, ...]]]

    @classmethod
    def of(cls, completion: Completion) -> Bits:
        assert completion.logprobs is not None
        lines = [(p.logprob, p.top_ids, p.top_logprobs) for p in completion.logprobs]
        return cls(completion.tokens, lines)


def prompt_of(llm: LLM, start: str, length: int) -> list[int]:
    return llm.text.tokenizer.encode(start + " " + WORDS * 40)[:length]


def test_warm_equals_cold_bit_for_bit(llm: LLM) -> None:
    prompt = prompt_of(llm, "The first tale.", 3 * GRID + 9)
    llm.loop.flush_cache()
    (cold,) = llm.generate(prompt, GREEDY)
    (warm,) = llm.generate(prompt, GREEDY)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 3 * GRID)
    assert Bits.of(warm) == Bits.of(cold)


def test_the_next_turn_equals_cold_bit_for_bit(llm: LLM) -> None:
    prompt = prompt_of(llm, "The second tale.", 2 * GRID + 20)
    llm.loop.flush_cache()
    (first,) = llm.generate(prompt, GREEDY)
    longer = prompt + first.tokens + prompt_of(llm, "And then?", 30)
    (warm,) = llm.generate(longer, SHORT)
    llm.loop.flush_cache()
    (cold,) = llm.generate(longer, SHORT)
    assert warm.cached_tokens > 0
    assert cold.cached_tokens == 0
    assert Bits.of(warm) == Bits.of(cold)


def test_a_batch_equals_solo_bit_for_bit(llm: LLM) -> None:
    lengths = [1, 17, GRID, GRID + 1, 2 * GRID + 33]
    prompts = [prompt_of(llm, f"Tale {n}.", n) for n in lengths]
    llm.loop.flush_cache()
    together = llm.generate(prompts, SHORT)
    llm.loop.flush_cache()
    alone = [llm.generate(prompt, SHORT)[0] for prompt in prompts]
    assert [Bits.of(c) for c in together] == [Bits.of(c) for c in alone]
