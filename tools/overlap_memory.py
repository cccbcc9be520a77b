"""Peak device memory and step time of decoding 16 rows x 4,000 tokens, with and without overlap.

python tools/overlap_memory.py [ROWS] [TOKENS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from pippin.config import EngineConfig
from pippin.offline.llm import LLM
from pippin.messages import Submit
from pippin.types import SamplingParams

# isort: split
import mlx.core as mx

STEPS = 140  # past two flushes of the tail


def measure(*, overlap: bool, rows: int, tokens: int) -> tuple[float, float]:
    """Peak GiB, and the median ms of a step, from when every row decodes."""
    with LLM(engine=EngineConfig(overlap=overlap)) as llm:
        ids = llm.text.tokenizer.encode("Once there was a little dog who liked to dig. " * tokens)
        params = SamplingParams(max_tokens=STEPS + 200, temperature=0.0, ignore_eos=True)
        for number in range(rows):  # one prompt for all: the tree computes it once
            llm.loop.submit(Submit(str(number), ids[:tokens], params))
        while len(llm.metrics.records) == 0 or llm.metrics.records[-1].decode_rows < rows:
            llm.loop.step()
        mx.reset_peak_memory()
        first = llm.metrics.records[-1].step
        while llm.metrics.records[-1].step < first + STEPS:
            llm.loop.step()
        done = [r.device_done for r in llm.metrics.records if r.step > first]
        gaps = [b - a for a, b in zip(done, done[1:], strict=False)]
        return mx.get_peak_memory() / 2**30, statistics.median(gaps) * 1e3


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        overlap, rows, tokens = sys.argv[2] == "True", int(sys.argv[3]), int(sys.argv[4])
        peak, ms = measure(overlap=overlap, rows=rows, tokens=tokens)
        print(f"overlap {overlap!s:5}: peak {peak:.3f} GiB, step {ms:.1f} ms", flush=True)
        return
    sizes = sys.argv[1:] or ["16", "4000"]
    for overlap in ("False", "True", "False", "True"):  # a process each: nothing is left over
        subprocess.run([sys.executable, __file__, "--one", overlap, *sizes], check=True)


if __name__ == "__main__":
    main()
