"""Prefill and decode of one batch. Every prompt is cold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from pippin import LLM
from pippin.bench.report import Report, Table, busy_note, median, number, say
from pippin.bench.serve import Count, Numbers
from pippin.config import Config
from shared import decode_step_seconds, greedy, last_step, prompts_for, run, timed

DEFAULT_ROWS = 64


@dataclass(frozen=True)
class Timing:
    """One batch size and prompt length."""

    batch: int
    input: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_seconds: float
    decode_tokens_per_second: float


def one_batch(
    config: Config,
    *,
    batch: Numbers = None,
    input: Numbers = None,
    output: Count = 64,
    repeats: Count = 3,
) -> Report:
    """Measure prefill and decode of one batch.

    Parameters
    ----------
    batch
        Batch sizes to measure. Default: 1,4,16.
    input
        Lengths of the prompts to measure, in tokens. Default: 512. Long contexts, for example:
        8192,32768,131072.
    output
        Number of tokens that each request of the batch decodes.
    repeats
        Number of runs per batch size and prompt length; the table shows medians.
    """
    batches, input_lens = batch or (1, 4, 16), input or (512,)
    notes = busy_note()
    timings = []
    with LLM(config=cold(config, max(batches))) as llm:
        for size, length in itertools.product(batches, input_lens):
            say(f"batch of {size}, {length:,} tokens each")
            timings.append(time_batch(llm, size, length, output, repeats))
    rows: list[tuple[str, ...]] = [
        (
            str(t.batch),
            f"{t.input:,}",
            number(t.prefill_seconds * 1e3),
            number(t.prefill_tokens_per_second),
            number(t.decode_seconds * 1e3),
            number(t.decode_tokens_per_second),
        )
        for t in timings
    ]
    header = ("batch", "tokens in", "prefill, ms", "tok/s", "decode, ms a step", "tok/s")
    table = Table(f"One batch, {output:,} tokens out", header, rows)
    data = {"settings": {"output": output}, "timings": [asdict(t) for t in timings]}
    return Report("one-batch", [table], data, notes)


def cold(config: Config, num_rows: int) -> Config:
    """With room for so many rows, and without what makes a step do less."""
    engine = config.engine
    given = DEFAULT_ROWS if engine.max_running == "auto" else engine.max_running
    engine = replace(engine, prefix_cache=False, speculate=engine.speculate or "off")
    return replace(config, engine=replace(engine, max_running=max(given, num_rows)))


def time_batch(
    llm: LLM,
    batch: int,
    input_len: int,
    output_len: int,
    repeats: int,
    choose: Callable[[list[float]], float] = median,
) -> Timing:
    prefills, steps = [], []
    # Early rows decode while late ones are still read: those steps do not count.
    beside = min(batch * input_len // 64, llm.loop.scheduler.slots.num_slots * 8)
    for turn in range(repeats + 1):  # the first warms up
        prompts = prompts_for(llm, f"one-batch {batch} {turn}")
        texts = [prompts.text(input_len) for _ in range(batch)]
        seconds = timed(llm, texts, [greedy(1)] * batch)
        begun = last_step(llm)
        timed(llm, texts, [greedy(output_len + beside)] * batch)
        if turn > 0:
            prefills.append(seconds)
            steps.append(decode_step_seconds(llm, batch, since_step=begun + 1))
    prefill, step = choose(prefills), choose(steps)
    return Timing(batch, input_len, prefill, batch * input_len / prefill, step, batch / step)


if __name__ == "__main__":
    run(one_batch, "model", "engine", without=("prefix_cache",))
