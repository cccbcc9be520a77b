"""Measures what a prompt that another engine computed costs the engine that decodes it.

    python tools/handover_cost.py                          the bundled model, 2,000 tokens, on loopback
    python tools/handover_cost.py --tokens 8000 --prefill torch

Both engines are in this process, each in a thread of its own. Prints, for each prompt: what computing it takes, the
time of the decode engine's thread for it when it was sent, and the share of bytes that had arrived when the prefill
engine had computed the last chunk.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from bundled import BUNDLED_PATH  # noqa: E402
from live_peers import LiveDecode, LivePrefill, ask  # noqa: E402
from pippin.backends.base import StepResult  # noqa: E402
from pippin.cache.entries.entry import Bytes, Entry  # noqa: E402
from pippin.config import EngineConfig, ModelConfig  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=str(BUNDLED_PATH), help="a directory")
    parser.add_argument("--prefill", default="mlx", help="backend of the prefill engine")
    parser.add_argument("--decode", default="mlx", help="backend of the decode engine")
    parser.add_argument("--tokens", type=int, default=2_000, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=5, help="after one that warms up")
    parser.add_argument("--memory", default="1GB", help="of each engine")
    args = parser.parse_args()
    first, second = (
        ModelConfig(args.model, backend=backend, dtype="float32") for backend in (args.prefill, args.decode)
    )
    engine = {"engine": EngineConfig(memory=args.memory, max_running=4)}
    rng = np.random.default_rng(1)
    with PrefillThread(first, engine) as prefill:
        decode = LiveDecode(second, prefill.address, **engine)
        decode.wait_for(connected=True)
        alone = LiveDecode(second, "tcp://127.0.0.1:1", **engine)
        vocab_size = decode.client.loop.backend.spec.vocab_size
        for number in range(1 + args.prompts):
            prompt = rng.integers(2, vocab_size, args.tokens).tolist()
            cpu, began = time.process_time(), time.perf_counter()
            ask(None, alone, prompt, max_tokens=1)
            computing, taken = time.process_time() - cpu, time.perf_counter() - began
            found = hand_over(prefill, decode, prompt)
            if number:
                print(
                    f"computed in {taken * 1e3:,.0f} ms ({computing * 1e3:,.0f} of processors); received in "
                    f"{found.taken * 1e3:,.0f} ms ({found.of_decode * 1e3:,.1f} of the decode engine, "
                    f"{found.of_decode / computing:.1%}); {found.nbytes / 1e6:,.1f} MB, {found.hidden:.0%} of them "
                    f"before the last chunk was computed, the rest {found.after * 1e3:,.1f} ms after it"
                )
        decode.close()
        alone.close()
    return 0


class PrefillThread:
    """A prefill engine whose steps run in a thread of its own."""

    def __init__(self, model: ModelConfig, engine: dict[str, EngineConfig]) -> None:
        self.address = ""
        self.computed_at = 0.0  # when the last chunk so far was
        self._started, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(model, engine))

    def __enter__(self) -> PrefillThread:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        time.sleep(0.5)  # as it ends, mlx frees what it compiled, which a Python that exits aborts

    def _run(self, model: ModelConfig, engine: dict[str, EngineConfig]) -> None:
        prefill = LivePrefill(model, **engine)
        scheduler = prefill.client.loop.scheduler
        commit = scheduler.commit

        def timed(step: int, result: StepResult) -> int:
            if scheduler.inflight_steps[step].plan.num_prefill_tokens:
                self.computed_at = time.perf_counter()
            return commit(step, result)

        scheduler.commit = timed
        self.address = prefill.address
        self._started.set()
        while not self._stop.is_set():
            prefill.step()
            if prefill.client.loop.idle:
                time.sleep(0.001)
        prefill.close()


class Received(NamedTuple):
    taken: float  # seconds from the request to its token
    of_decode: float  # of the decode engine's thread
    nbytes: int
    hidden: float  # share of these that arrived while chunks were computed
    after: float  # seconds from the last chunk to the last arrival


def hand_over(prefill: PrefillThread, decode: LiveDecode, prompt: list[int]) -> Received:
    store = decode.client.loop.scheduler.traffic.tiers[-1].tier_io.store
    arrive, arrived = store.arrive, []

    def timed(id: str, entry: Entry, data: Sequence[Bytes], digest: bytes) -> bool:
        kept = arrive(id, entry, data, digest)
        arrived.append((time.perf_counter(), entry.nbytes))
        return kept

    store.arrive = timed
    began, cpu = time.perf_counter(), time.thread_time()
    reply = decode.client.submit(prompt, max_tokens=1)
    while not reply.finish:
        decode.client.step()
    taken, of_decode = time.perf_counter() - began, time.thread_time() - cpu
    while not decode.client.loop.idle:
        decode.client.step()
    store.arrive = arrive
    assert reply.peer_tokens == len(prompt)
    nbytes = sum(size for _, size in arrived)
    hidden = sum(size for at, size in arrived if at <= prefill.computed_at) / nbytes
    return Received(taken, of_decode, nbytes, hidden, arrived[-1][0] - prefill.computed_at)


if __name__ == "__main__":
    sys.exit(main())
