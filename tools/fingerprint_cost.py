"""What fingerprints of cached payloads cost: the same work with and without them, in turns.

    python tools/fingerprint_cost.py [MODEL] [--backend mlx|torch] [--rounds 8] [--length 512]

A round is a few new prompts with short replies, each asked twice: captures, then restores. The
median round counts; on a machine that does other things too, neither line means much.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter, process_time
from typing import Literal

import numpy as np

from pippin import LLM, SamplingParams
from pippin.config import Config, EngineConfig, ModelConfig

MODES: tuple[Literal["off", "log"], ...] = ("off", "log")
NUM_PROMPTS = 4
REPLY_TOKENS = 32


def run_round(llm: LLM, prompts: list[list[int]]) -> tuple[float, float]:
    """Seconds on the clock, and of this process's cores."""
    params = SamplingParams(max_tokens=REPLY_TOKENS, temperature=0.0, ignore_eos=True)
    wall, cpu = perf_counter(), process_time()
    for _ in range(2):
        llm.generate(prompts, params)
    return perf_counter() - wall, process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=ModelConfig().model)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    engines = {
        canary: LLM(
            config=Config(
                model=ModelConfig(model=options.model, backend=options.backend),
                engine=EngineConfig(canary=canary, memory="0.3"),
            )
        )
        for canary in MODES
    }
    rng = np.random.default_rng(0)
    times: dict[str, list[tuple[float, float]]] = {canary: [] for canary in engines}
    for number in range(options.rounds + 1):
        prompts = rng.integers(10, 5_000, (NUM_PROMPTS, options.length)).tolist()
        order = MODES if number % 2 else MODES[::-1]
        for canary in order:
            found = run_round(engines[canary], prompts)
            if number:  # the first is for compiling
                times[canary].append(found)
    for place, what in enumerate(("clock", "cores")):
        off, on = (statistics.median(t[place] for t in times[c]) for c in MODES)
        print(f"{what}: {off:.3f} s a round without, {on:.3f} s with: {100 * (on / off - 1):+.1f}%")
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
