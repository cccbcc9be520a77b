"""What `--canary log` costs: the same work without it, with fingerprints alone, and with all of it.

    python tools/fingerprint_cost.py [MODEL] [--backend mlx|torch] [--rounds 8] [--length 512]

A round is a few new prompts with short replies, each asked twice: captures, then restores. The
engines take turns. On a machine that does other things too, only the least of the cores' seconds
means anything.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import perf_counter, process_time

import numpy as np

import pippin.engine.build_loop
from pippin import LLM, SamplingParams
from pippin.config import Config, EngineConfig, ModelConfig

NUM_PROMPTS = 4
REPLY_TOKENS = 32
WITHOUT, PRINTS, ALL = "without", "fingerprints", "canary log"


def make_engine(name: str, options: argparse.Namespace, number: int) -> LLM:
    """The memory that a GPU's budget counts is the process's: each engine's is behind the last."""
    keeps, canary = pippin.engine.build_loop.keeps_fingerprints, "log" if name == ALL else "off"
    if name == PRINTS:
        pippin.engine.build_loop.keeps_fingerprints = lambda _: True
    try:
        model = ModelConfig(model=options.model, backend=options.backend)
        return LLM(config=Config(model=model, engine=EngineConfig(canary=canary, memory=f"{0.2 * number}")))
    finally:
        pippin.engine.build_loop.keeps_fingerprints = keeps


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
    names = (WITHOUT, PRINTS, ALL)
    engines = {name: make_engine(name, options, n) for n, name in enumerate(names, start=1)}
    rng = np.random.default_rng(0)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for number in range(options.rounds + 1):
        prompts = rng.integers(10, 5_000, (NUM_PROMPTS, options.length)).tolist()
        for name in (*names[number % 3 :], *names[: number % 3]):
            found = run_round(engines[name], prompts)
            if number:  # the first is for compiling
                times[name].append(found)
    for place, what in enumerate(("clock", "cores")):
        for name in engines:
            seconds = [found[place] for found in times[name]]
            plain = [found[place] for found in times[WITHOUT]]
            least, middle = min(seconds) / min(plain), median(seconds) / median(plain)
            print(f"{what}, {name}: {median(seconds):.3f} s a round by the median", end=", ")
            print(f"{middle - 1:+.1%}; by the least {least - 1:+.1%}")
    for llm in engines.values():
        llm.close()


if __name__ == "__main__":
    main()
