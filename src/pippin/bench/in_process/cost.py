"""What the prefix cache costs where it cannot help: new prompts, with it and without.

Both engines share one loaded model in one process and take turns. Knows only the offline API.
"""

from __future__ import annotations

import dataclasses

from pippin import LLM
from pippin.bench.errors import BenchError
from pippin.bench.in_process.steps import first_token_seconds, generate, last_step, prompts_for
from pippin.bench.results.pairs import Compared, Pairs, in_turn, pairs_table
from pippin.bench.results.report import Part
from pippin.config import Config

HIGHEST_RATIO = 1.03
GRID = 64  # prompts share no block of this many tokens
REPLY_TOKENS = 8  # so that a decode step follows the prompt in both engines


def cache_cost(config: Config, *, prompt_tokens: int, num_pairs: int) -> Part:
    engine = dataclasses.replace(config.engine, prefix_cache=True)
    with LLM(config=dataclasses.replace(config, engine=engine)) as cached:
        uncached = cached.beside(prefix_cache=False, overlap=engine.overlap)

        def turn(llm: LLM, name: str) -> tuple[float, float]:
            """Seconds to the first token, and until the request is removed from the engine."""
            text = prompts_for(llm, f"cost {name}").text(prompt_tokens)
            begun = last_step(llm)
            total = generate(llm, [text], max_tokens=REPLY_TOKENS)
            return first_token_seconds(llm, since_step=begun + 1), total

        tried, base = in_turn(
            num_pairs, lambda name: turn(cached, name), lambda name: turn(uncached, name)
        )
        if cached.metrics.cached_tokens >= GRID:
            raise BenchError(f"{cached.metrics.cached_tokens:,} tokens of new prompts were cached")
    ttft, total = (
        Pairs([times[index] for times in tried], [times[index] for times in base])
        for index in range(2)
    )
    table = pairs_table(
        f"What the cache costs: {num_pairs} pairs of new {prompt_tokens:,}-token prompts",
        "cache",
        "no cache",
        [
            Compared("time to first token, ms", ttft, 1e3, at_most=HIGHEST_RATIO),
            Compared("until the request is removed, ms", total, 1e3),
        ],
    )
    return table, {"ttft": ttft.as_dict(), "total": total.as_dict()}
