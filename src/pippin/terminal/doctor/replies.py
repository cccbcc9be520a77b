"""Greedy replies of one model, computed in two ways. Knows no backend.

Replies may differ only from two tokens of nearly equal probability on: there rounding decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pippin import LLM, SamplingParams
from pippin.offline.offline_requests import Completion
from pippin.terminal.doctor.engine import Engine
from pippin.terminal.doctor.findings import SAFE, Finding, checked
from pippin.types import TokenLogprobs

PROMPTS = (
    "Once",
    "The fox and the crow met",
    "A little girl named Lily found a small red box under her bed. She",
    "Tom had a big dog. The dog liked to run and play in the park with " * 4,
)
REPLY_TOKENS = 24
PARAMS = SamplingParams(max_tokens=REPLY_TOKENS, temperature=0.0, ignore_eos=True, logprobs=4)


def batch(engine: Engine) -> Iterator[Finding]:
    together, alone = _batched(engine.llm), _alone(engine.llm)
    yield compared(
        "batched = alone",
        together,
        alone,
        engine.margin,
        means="replies depend on which other requests run: results are wrong",
    )


def plain(engine: Engine) -> Iterator[Finding]:
    """All that `pippin serve` would use of Pippin's own on this model, against --safe."""
    if engine.is_plain:
        yield Finding("as served = --safe", "the same: plain operations already")
        return
    margin, usual = engine.margin, _batched(engine.llm)
    with engine.safe() as safe:
        expected = _batched(safe)
    yield compared(
        "as served = --safe",
        usual,
        expected,
        margin,
        means="an operation or a kernel of Pippin's computes wrong results on this machine",
    )


def _batched(llm: LLM) -> list[Completion]:
    return llm.generate(PROMPTS, PARAMS)


def _alone(llm: LLM) -> list[Completion]:
    return [llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS]


def compared(
    name: str,
    first: Sequence[Completion],
    second: Sequence[Completion],
    margin: float,
    means: str,
) -> Finding:
    same = [_num_same(a, b) for a, b in zip(first, second, strict=True)]
    leads = [
        _lead(a.logprobs[n], a.tokens[n], b.tokens[n])
        for a, b, n in zip(first, second, same, strict=True)
        if n < len(a.tokens) and a.logprobs
    ]
    moved = max(_moved(a, b, max(n, 1)) for a, b, n in zip(first, second, same, strict=True))
    total = len(PROMPTS) * REPLY_TOKENS
    value = f"{sum(same)} of {total} greedy tokens are equal, log probabilities within {moved:.1g}"
    if leads:
        value += (
            f"; {len(leads)} replies differ, first at tokens whose log probabilities differ by at "
            f"most {max(leads):.2g}"
        )
    is_level = max(leads, default=0.0) <= margin and moved <= max(margin, 1e-6)
    return checked(
        name,
        f"{value} (limit {margin:g})",
        ok=2 * sum(same) >= total and is_level,
        means=means,
        remedy=SAFE,
        numbers={"equal_tokens": sum(same), "tokens": total, "logprob_difference": moved},
    )


def _num_same(a: Completion, b: Completion) -> int:
    pairs = zip(a.tokens, b.tokens, strict=True)
    return next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), len(a.tokens))


def _moved(a: Completion, b: Completion, num_tokens: int) -> float:
    """The largest difference of log probabilities among the first tokens."""
    pairs = zip((a.logprobs or [])[:num_tokens], (b.logprobs or [])[:num_tokens], strict=True)
    return max(abs(mine.logprob - theirs.logprob) for mine, theirs in pairs)


def _lead(scored: TokenLogprobs, first: int, second: int) -> float:
    """How far apart two tokens are; infinitely if one is not among the likeliest."""
    known = dict(zip(scored.top_ids, scored.top_logprobs, strict=True))
    return abs(known.get(first, math.inf) - known.get(second, -math.inf))
