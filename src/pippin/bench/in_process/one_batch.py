"""`pippin bench one-batch`: prefill and decode of one batch, beside what the machine allows.

The same code for every backend: it uses only the offline API. No cache, so every prompt is cold.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from pippin import LLM
from pippin.bench.in_process.products import Context, read_context, read_products
from pippin.bench.in_process.steps import (
    decode_step_seconds,
    generate,
    last_step,
    prompts_for,
)
from pippin.bench.results.report import Report, Table, busy_note, number, say
from pippin.bench.results.samples import median
from pippin.config import Config

GIGA = 1e9


class Ceilings(Protocol):
    """Of a library, for a checkpoint's shapes."""

    def step_bytes(self, rows: int) -> float: ...
    def flops_per_token(self) -> int: ...
    def prefill_seconds(self, rows: int) -> float: ...
    def decode_seconds(self, rows: int) -> float: ...
    def memory_bytes_per_second(self) -> float: ...


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
    batches: Sequence[int],
    input_lens: Sequence[int],
    output_len: int,
    repeats: int,
    wants_ceilings: bool = True,
) -> Report:
    notes = busy_note()
    engine = dataclasses.replace(
        config.engine.without_usual_drafts().with_rows(max(batches)), prefix_cache=False
    )
    with LLM(config=dataclasses.replace(config, engine=engine)) as llm:
        timings = []
        for batch, input_len in itertools.product(batches, input_lens):
            say(f"batch of {batch}, {input_len:,} tokens each")
            timings.append(time_batch(llm, batch, input_len, output_len, repeats))
        chunks = [min(llm.prefill_tokens, timing.batch * timing.input) for timing in timings]
        config, spec = llm.config, llm.loop.backend.spec
    ceilings = _find_ceilings(config) if wants_ceilings else None  # its weights, after those of llm
    memory = 0.0
    if ceilings is None and wants_ceilings:
        notes.append(
            "Ceilings are measured for unquantized checkpoints; on MLX for those without experts."
        )
    if ceilings is not None:
        say("measuring what the machine allows")
        memory = ceilings.memory_bytes_per_second()
        context = read_context(Path(config.model.model), spec)
        timings = [
            _with_ceilings(timing, ceilings, context, chunk, output_len, memory)
            for timing, chunk in zip(timings, chunks, strict=True)
        ]
        notes.append(_describe(ceilings, max(chunks), memory))
    settings = {"output": output_len, "memory_bytes_per_second": memory}
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


def _find_ceilings(config: Config) -> Ceilings | None:
    if config.model.backend == "fake":
        return None
    products = read_products(Path(config.model.model))
    if products is None or (products.experts and config.model.backend == "mlx"):
        return None
    if config.model.backend == "mlx":  # neither library is everywhere
        from pippin.bench.in_process import ceilings

        return ceilings.Ceilings(products, config.model.dtype)
    from pippin.bench.in_process import torch_ceilings

    return torch_ceilings.TorchCeilings(products, config.model.dtype)


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
