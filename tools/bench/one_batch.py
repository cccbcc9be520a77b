"""Prefill and decode of one batch, beside what the machine allows. Every prompt is cold."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ceilings import Ceilings, Context, find_ceilings, read_context
from pippin import LLM
from pippin.bench.report import Report, Table, busy_note, median, number, say
from pippin.bench.serve import Count, Numbers
from pippin.config import Config
from shared import run, with_rows, without_usual_drafts
from steps import decode_step_seconds, generate, last_step, prompts_for

GIGA = 1e9


@dataclass(frozen=True)
class Timing:
    """One batch size and prompt length. The ceilings are None where they are not known."""

    batch: int
    input: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_seconds: float
    decode_tokens_per_second: float
    prefill_ceiling: float | None = None  # tokens a second that the bare products allow
    decode_ceiling: float | None = None
    # ... that reading the weights and the rows' contexts once a step allows
    decode_memory_ceiling: float | None = None


def one_batch(
    config: Config,
    *,
    batch: Numbers = None,
    input: Numbers = None,
    output: Count = 64,
    repeats: Count = 3,
    ceilings: bool = True,
) -> Report:
    """Measure prefill and decode of one batch, and how close they are to the machine's limits.

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
    ceilings
        Also measure the limits of the machine, which takes a few seconds.
    """
    batches, input_lens = batch or (1, 4, 16), input or (512,)
    notes = busy_note()
    engine = dataclasses.replace(
        with_rows(without_usual_drafts(config.engine), max(batches)), prefix_cache=False
    )
    with LLM(config=dataclasses.replace(config, engine=engine)) as llm:
        timings = []
        for size, length in itertools.product(batches, input_lens):
            say(f"batch of {size}, {length:,} tokens each")
            timings.append(time_batch(llm, size, length, output, repeats))
        chunks = [
            min(llm.loop.scheduler.limits.prefill_tokens, timing.batch * timing.input)
            for timing in timings
        ]
        config, spec = llm.config, llm.loop.backend.spec
    best = None
    if ceilings:  # their weights, after those of llm
        model = config.model
        best = find_ceilings(Path(model.model), model.backend, model.dtype)
    memory = 0.0
    if best is None and ceilings:
        notes.append(
            "Ceilings are measured for unquantized checkpoints; on MLX for those without experts."
        )
    if best is not None:
        say("measuring what the machine allows")
        memory = best.memory_bytes_per_second()
        context = read_context(Path(config.model.model), spec)
        timings = [
            _with_ceilings(timing, best, context, chunk, output, memory)
            for timing, chunk in zip(timings, chunks, strict=True)
        ]
        notes.append(_describe(best, max(chunks), memory))
    settings = {"output": output, "memory_bytes_per_second": memory}
    return summarize(timings, settings, notes)


def time_batch(
    llm: LLM,
    batch: int,
    input_len: int,
    output_len: int,
    repeats: int,
    choose: Callable[[list[float]], float] = median,
) -> Timing:
    prefills, steps = [], []
    for turn in range(repeats + 1):  # the first warms up
        prompts = prompts_for(llm, f"one-batch {batch} {turn}")
        texts = [prompts.text(input_len) for _ in range(batch)]
        seconds = generate(llm, texts, max_tokens=1)
        begun = last_step(llm)
        # Early rows decode while late ones are still read: those steps do not count.
        generate(llm, texts, max_tokens=output_len + _steps_of_prefill(llm, batch * input_len))
        if turn > 0:
            prefills.append(seconds)
            steps.append(decode_step_seconds(llm, batch, since_step=begun + 1))
    prefill, step = choose(prefills), choose(steps)
    return Timing(batch, input_len, prefill, batch * input_len / prefill, step, batch / step)


def _steps_of_prefill(llm: LLM, num_tokens: int) -> int:
    """The most steps that reading a batch can take while its first rows already decode."""
    return min(num_tokens // 64, llm.loop.scheduler.slots.num_slots * 8)


def _with_ceilings(
    timing: Timing,
    ceilings: Ceilings,
    context: Context,
    chunk: int,
    output_len: int,
    memory: float,
) -> Timing:
    """Products of queries and keys at the rate of the others: long prompts are mostly those."""
    products = ceilings.prefill_seconds(chunk)
    flops = ceilings.flops_per_token() + context.prompt_flops(timing.input) / timing.input
    step = ceilings.decode_seconds(timing.batch)
    read = ceilings.step_bytes(timing.batch)
    read += timing.batch * context.step_bytes(timing.input + output_len // 2)
    return dataclasses.replace(
        timing,
        prefill_ceiling=chunk / products * ceilings.flops_per_token() / flops,
        decode_ceiling=timing.batch / step,
        decode_memory_ceiling=timing.batch * memory / read,
    )


def _describe(ceilings: Ceilings, chunk: int, memory: float) -> str:
    rate = chunk * ceilings.flops_per_token() / ceilings.prefill_seconds(chunk)
    return (
        f"Ceilings of this machine: {number(rate / GIGA)} GFLOP/s in a bare chain of the model's "
        f"products for {chunk} tokens, {number(memory / GIGA)} GB/s from memory, of which a "
        f"step of one row reads {number(ceilings.step_bytes(1) / 1e6)} MB of weights. Shares of "
        "memory count the rows' contexts too, shares of products the attention of prompts."
    )


def summarize(timings: list[Timing], settings: dict[str, float], notes: list[str]) -> Report:
    prefill = ("prefill, ms", "tok/s", "of products")
    decode = ("decode, ms a step", "tok/s", "of products", "of memory")
    rows: list[tuple[str, ...]] = [
        (
            str(t.batch),
            f"{t.input:,}",
            number(t.prefill_seconds * 1e3),
            number(t.prefill_tokens_per_second),
            _share(t.prefill_tokens_per_second, t.prefill_ceiling),
            number(t.decode_seconds * 1e3),
            number(t.decode_tokens_per_second),
            _share(t.decode_tokens_per_second, t.decode_ceiling),
            _share(t.decode_tokens_per_second, t.decode_memory_ceiling),
        )
        for t in timings
    ]
    title = f"One batch, {settings['output']:,} tokens out"
    table = Table(title, ("batch", "tokens in", *prefill, *decode), rows)
    data = {"settings": settings, "timings": [asdict(t) for t in timings]}
    return Report("one-batch", [table], data, notes)


def _share(rate: float, ceiling: float | None) -> str:
    return f"{rate / ceiling:.0%}" if ceiling else "–"


if __name__ == "__main__":
    run(one_batch, "model", "engine", without=("prefix_cache",))
