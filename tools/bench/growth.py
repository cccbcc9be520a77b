"""How a step's time grows with skewed lengths, the size of the prefix tree and requests.

The tree and the number of requests are measured on the toy backend, whose model costs next to
nothing: what is left is the host's own work.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from functools import partial

from pippin import LLM
from pippin.bench.report import BenchError, Report, Table, median, number, say
from pippin.config import Config, EngineConfig, ModelConfig
from shared import Names, Part, report_parts, run, verdict, with_rows, without_usual_drafts
from steps import (
    admission_seconds,
    decode_step_seconds,
    generate,
    host_step_seconds,
    last_step,
    prompts_for,
)

SKEWS = (1024, 8192)
SHORT_CONTEXT = 100
SKEWED_ROWS = 16  # one long among these
ROUNDS = 3
STEPS = 32  # decoded together, at least
TREE_TOKENS = (100_000, 200_000, 500_000, 1_000_000)
TREE_PROMPT = 100_000
TREE_REPEATS = 9
FILL_PROMPT = 4000
REQUESTS = (1, 4, 16, 64, 256)
TOY_SHORT = 16
TOY_VOCAB = 97


def curve(title: str, x: str, y: str, points: list[tuple[float, float]], most: float) -> Part:
    """A time, or a ratio of times, by something that grows; `most`: the target of the last one."""
    rows: list[tuple[str, ...]] = [(f"{size:,.0f}", number(value), "") for size, value in points]
    rows[-1] = (*rows[-1][:2], verdict(points[-1][1], "{:g}", at_most=most))
    return Table(title, (x, y, "target"), rows), points


def skew(config: Config) -> Part:
    """One long row among short ones, over the long row alone plus the short ones alone."""
    engine = with_rows(without_usual_drafts(config.engine), SKEWED_ROWS)
    short = [SHORT_CONTEXT] * (SKEWED_ROWS - 1)
    points = []
    with LLM(config=dataclasses.replace(config, engine=engine)) as llm:
        longest = llm.max_len - _num_generated(SKEWED_ROWS)  # room for the reply
        for length in sorted({min(length, longest) for length in SKEWS}):
            ratios = [
                _step_ms(llm, [length, *short]) / (_step_ms(llm, [length]) + _step_ms(llm, short))
                for _ in range(ROUNDS)
            ]
            points.append((float(length), median(ratios)))
    title = f"One long row among {len(short)} of {SHORT_CONTEXT} tokens, over its parts' sum"
    return curve(title, "tokens of the long row", "step / sum of parts", points, 1.3)


def _step_ms(llm: LLM, contexts: Sequence[int]) -> float:
    """A decode step over rows of these lengths, whose prompts come from the prefix cache."""
    say(f"decode: {len(contexts)} rows, the longest of {max(contexts):,} tokens")
    prompts = prompts_for(llm, "growth")
    texts = [prompts.text(length) for length in contexts]
    generate(llm, texts, max_tokens=1)
    begun = last_step(llm)
    generate(llm, texts, max_tokens=_num_generated(len(contexts)))
    return decode_step_seconds(llm, len(contexts), since_step=begun + 1) * 1e3


def _num_generated(num_rows: int) -> int:
    """Enough that all rows decode together for a while, though they start one after another."""
    return STEPS + 2 * num_rows


def tree(config: Config) -> Part:
    """Admitting a known prompt, with ever more in the tree."""
    source = random.Random("tree")
    points = []
    toy = _toy(config, max_running=1, prefill_tokens=TREE_PROMPT, max_len=2 * TREE_PROMPT)
    with LLM(config=toy) as llm:
        known = _toy_prompt(source, TREE_PROMPT)
        generate(llm, [known], max_tokens=1)
        filled = TREE_PROMPT
        for size in TREE_TOKENS:
            say(f"tree: {size:,} tokens")
            while filled < size:
                generate(llm, [_toy_prompt(source, FILL_PROMPT)], max_tokens=1)
                filled += FILL_PROMPT
            seconds = [_admit(llm, known) for _ in range(TREE_REPEATS)]
            points.append((float(size), median(seconds) * 1e3))
    title = f"Matching and planning a known {TREE_PROMPT:,}-token prompt"
    return curve(title, "tokens in the tree", "ms", points, 5.0)


def _admit(llm: LLM, prompt: list[int]) -> float:
    begun = last_step(llm)
    cached = llm.metrics.cached_tokens
    generate(llm, [prompt], max_tokens=1)
    if llm.metrics.cached_tokens - cached < len(prompt) // 2:
        raise BenchError("the known prompt was evicted from the tree: raise --memory")
    return admission_seconds(llm, since_step=begun + 1)


def requests(config: Config) -> Part:
    """The scheduler's work for one decode step."""
    source = random.Random("requests")
    points = []
    with LLM(config=_toy(config, max_running=max(REQUESTS))) as llm:
        for count in REQUESTS:
            say(f"requests: {count}")
            prompts = [_toy_prompt(source, TOY_SHORT) for _ in range(count)]
            generate(llm, prompts, max_tokens=_num_generated(count))
            points.append((float(count), host_step_seconds(llm, count) * 1e3))
    title = "Plan and commit of one decode step"
    return curve(title, "running requests", "ms a step", points, 1.0)


PARTS = {"skew": skew, "tree": tree, "requests": requests}


def growth(config: Config, *, only: Names = None) -> Report:
    """Measure how step time grows with skewed lengths, the size of the cache and requests.

    Parameters
    ----------
    only
        Parts to run: skew, tree, requests. Default: all.
    """
    parts = {name: partial(measure, config) for name, measure in PARTS.items()}
    return report_parts("growth", parts, only or ())


def _toy(config: Config, *, max_len: int | None = None, **engine: int | bool) -> Config:
    model = ModelConfig(model=config.model.model, backend="fake", max_len=max_len)
    settings = EngineConfig(memory=config.engine.memory, **engine)  # type: ignore[arg-type]
    return dataclasses.replace(config, model=model, engine=settings)


def _toy_prompt(source: random.Random, num_tokens: int) -> list[int]:
    return [source.randrange(TOY_VOCAB) for _ in range(num_tokens)]


if __name__ == "__main__":
    run(growth, "model", "engine")
