"""What a chunk of a prompt costs the host on a CPU, with operations of ours and without them.

    python tools/forward_cost.py [--model DIR] [--tokens 16 32 64 128 512] [--before 256] [--kinds]

Counts the operations of a forward's graph and times it, one kind after the other in every round, so
that what else the machine does is shared alike. In milliseconds, medians:

    build   CPU time of this thread until the graph is there
    host    the same with mlx's evaluation, which hands the operations to its own thread
    CPU     of the whole process: this thread, mlx's and the BLAS's
    wall    until the results are there

`--kinds` lists the operations by name.
"""

from __future__ import annotations

import argparse
import io
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import pippin.backends.mlx  # noqa: E402  (the fast BLAS, before mlx)

# isort: split
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

import pippin  # noqa: E402
from pippin.backends.mlx.cpu.operations.bindings import without_operations  # noqa: E402
from pippin.backends.mlx.load import LoadedModel, load  # noqa: E402
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState  # noqa: E402

BUNDLED = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "plain": without_operations,
    "ours": nullcontext,
}


@dataclass(frozen=True)
class Cost:
    build: float
    host: float
    cpu: float
    wall: float


def chunk(loaded: LoadedModel, prompt: PromptState, tokens: np.ndarray) -> list[mx.array]:
    """Append `tokens` to `prompt`; all that has to be computed for that."""
    batch = ChunkBatch(loaded.layout, [tokens], [prompt])
    loaded.head.positions = mx.array(batch.last_positions[:, None])
    logits = loaded.forward(batch.tokens, batch.caches)
    loaded.head.positions = None
    loaded.take_hidden()
    batch.advance()
    return [logits, *prompt.arrays()]


def prompt_of(loaded: LoadedModel, num_tokens: int) -> PromptState:
    prompt = PromptState()
    if num_tokens:
        mx.eval(chunk(loaded, prompt, np.arange(num_tokens, dtype=np.int32) % 500))
    return prompt


def another_chunk(loaded: LoadedModel, prompt: PromptState, tokens: np.ndarray) -> list[mx.array]:
    """The prompt itself stays as it is."""
    copy = PromptState(prompt.length, dict(prompt.kv), dict(prompt.states))
    return chunk(loaded, copy, tokens)


def kinds(written: list[mx.array]) -> Counter[str]:
    text = io.StringIO()
    mx.export_to_dot(text, *written)
    return Counter(re.findall(r'label ?= ?"([A-Za-z0-9 ]+)"', text.getvalue()))


def timed(run: Callable[[], list[mx.array]]) -> Cost:
    wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    written = run()
    built = time.thread_time()
    mx.async_eval(written)
    launched = time.thread_time()
    mx.eval(written)
    spent = (built - own, launched - own, time.process_time() - cpu, time.perf_counter() - wall)
    return Cost(*(1e3 * seconds for seconds in spent))


def compared(
    runs: dict[str, Callable[[], list[mx.array]]], num_rounds: int
) -> dict[str, tuple[list[Cost], Counter[str]]]:
    """Of each way: what every round cost, and the operations."""
    found: dict[str, tuple[list[Cost], Counter[str]]] = {}
    for way, run in runs.items():
        with WAYS[way]():
            timed(run)  # for kernels, buffers and caches
            found[way] = [], kinds(run())
    for _ in range(num_rounds):
        for way, run in runs.items():
            with WAYS[way]():
                found[way][0].append(timed(run))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64, 128, 512])
    parser.add_argument("--before", type=int, default=256, help="tokens of the prompt before it")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--kinds", action="store_true", help="list the operations by name")
    options = parser.parse_args()
    models: dict[str, tuple[LoadedModel, PromptState]] = {}
    for way, used in WAYS.items():
        with used():
            loaded = load(options.model)
            models[way] = loaded, prompt_of(loaded, options.before)
    print("tokens  way    operations   build    host     CPU    wall")
    for num_tokens in options.tokens:
        tokens = np.arange(num_tokens, dtype=np.int32) % 500
        runs = {way: partial(another_chunk, *model, tokens) for way, model in models.items()}
        for way, (costs, found) in compared(runs, options.rounds).items():
            fields = (median(getattr(cost, name) for cost in costs) for name in Cost.__match_args__)
            numbers = "".join(f"{value:8.2f}" for value in fields)
            print(f"{num_tokens:6}  {way:6}{found.total():11}{numbers}")
            if options.kinds:
                print("       ", ", ".join(f"{n} {name}" for name, n in found.most_common()))


if __name__ == "__main__":
    main()
