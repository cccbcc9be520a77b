"""What a decode step takes, by rows and by the tokens that each holds. Knows no backend."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median
from time import monotonic

from pippin import LLM, SamplingParams
from pippin.terminal.doctor.engine import Engine
from pippin.terminal.doctor.findings import Finding, TimeLimit

ROWS, CONTEXTS = (1, 4, 16), (64, 512, 2048)
NUM_STEPS = 16


def steps(engine: Engine, limit: TimeLimit) -> Iterator[Finding]:
    """From the least work to the most; what would exceed the time limit is left out."""
    llm = engine.llm
    contexts = [n for n in CONTEXTS if n + 8 * NUM_STEPS < llm.max_len]
    rows = [n for n in ROWS if n <= llm.loop.scheduler.slots.num_slots]
    taken: dict[tuple[int, int], float | None] = {}
    per_token = 0.0
    for num_rows, context in sorted(itertools.product(rows, contexts), key=lambda c: c[0] * c[1]):
        if per_token * num_rows * context > limit.left() / 2:  # half is for the last section
            break
        started = monotonic()
        taken[num_rows, context] = step_seconds(llm, num_rows, context)
        per_token = max(per_token, (monotonic() - started) / (num_rows * context + NUM_STEPS))
    for num_rows in rows:
        found = {context: taken.get((num_rows, context)) for context in contexts}
        yield Finding(
            f"{num_rows} row" + ("" if num_rows == 1 else "s"),
            ", ".join(f"{_shown(s)} at {context:,} tokens" for context, s in found.items()),
            numbers={str(context): 1e3 * s for context, s in found.items() if s is not None},
        )


def _shown(seconds: float | None) -> str:
    return "not timed" if seconds is None else f"{1e3 * seconds:.1f} ms"


def step_seconds(llm: LLM, num_rows: int, context: int) -> float | None:
    """The median of steps that decode all the rows and do nothing else; None if there were none."""
    first = llm.metrics.records[-1].step + 1 if llm.metrics.records else 0
    vocab_size = llm.loop.backend.spec.vocab_size
    prompts = [
        [1 + (row * 7919 + place * 31) % (vocab_size - 1) for place in range(context)]
        for row in range(num_rows)
    ]
    # Early rows decode while late ones are still read.
    num_tokens = NUM_STEPS + min(num_rows * context // 64, 6 * NUM_STEPS)
    llm.generate(prompts, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    seconds = [
        after.device_done - before.device_done
        for before, after in itertools.pairwise(llm.metrics.records)
        if before.step >= first and not after.after_pause
        if all(r.prefill_tokens == 0 and r.decode_rows == num_rows for r in (before, after))
    ]
    return median(seconds) if seconds else None
