"""Measures what a prompt that another engine computed costs the engine that decodes it.

    python tools/handover_cost.py                          the bundled model, 2,000 tokens, on loopback
    python tools/handover_cost.py --tokens 8000 --prefill torch

Both engines are in this process, and their steps are run in turn. Prints, for each prompt: the processor time that
computing it takes, the time of the decode engine's thread for it when it was sent, and the share of bytes that had
arrived when the prefill engine had computed the last chunk.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from bundled import BUNDLED_PATH  # noqa: E402
from live_peers import LiveDecode, LivePrefill, ask, pair_of  # noqa: E402
from pippin.config import EngineConfig, ModelConfig  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(BUNDLED_PATH), help="a directory")
    parser.add_argument("--prefill", default="mlx", help="backend of the prefill engine")
    parser.add_argument("--decode", default="mlx", help="backend of the decode engine")
    parser.add_argument("--tokens", type=int, default=2_000, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--memory", default="1GB", help="of each engine")
    args = parser.parse_args()
    first, second = (
        ModelConfig(args.model, backend=backend, dtype="float32") for backend in (args.prefill, args.decode)
    )
    engine = {"engine": EngineConfig(memory=args.memory, max_running=4)}
    rng = np.random.default_rng(1)
    with pair_of(first, decode_model=second, prefill=engine, decode=engine) as (prefill, decode):
        alone = LiveDecode(second, "tcp://127.0.0.1:1", **engine)
        vocab_size = decode.client.loop.backend.spec.vocab_size
        for _ in range(args.prompts):
            prompt = rng.integers(2, vocab_size, args.tokens).tolist()
            began = time.process_time()
            ask(None, alone, prompt, max_tokens=1)
            computing = time.process_time() - began
            seconds, hidden = hand_over(prefill, decode, prompt)
            print(
                f"computing {computing * 1e3:,.0f} ms, received {seconds * 1e3:,.1f} ms "
                f"({seconds / computing:.1%}), {hidden:.0%} of the bytes before the last chunk was computed"
            )
        alone.close()
    return 0


def hand_over(prefill: LivePrefill, decode: LiveDecode, prompt: list[int]) -> tuple[float, float]:
    """Seconds of the decode engine's thread, and the share of bytes that computing hid."""
    before, finished = decode.handovers["arrived_bytes"], _num_finished(prefill)
    reply = decode.client.submit(prompt, max_tokens=1)
    seconds, hidden = 0.0, None
    while not (decode.client.loop.idle and reply.finish):
        prefill.step()
        if hidden is None and _num_finished(prefill) > finished:
            hidden = decode.handovers["arrived_bytes"] - before
        began = time.thread_time()
        decode.client.step()
        seconds += time.thread_time() - began
    assert reply.peer_tokens == len(prompt)
    return seconds, (hidden or 0) / (decode.handovers["arrived_bytes"] - before)


def _num_finished(prefill: LivePrefill) -> int:
    return int(prefill.client.loop.counters()["metrics"]["requests_finished"])


if __name__ == "__main__":
    sys.exit(main())
