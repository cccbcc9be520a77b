"""A long prompt read from disk by an engine that never saw it, against computing it.

    python tools/disk_load.py [--backend torch|mlx] [--prompt 32768] [--model DIR] [--dir DIR]

Without --model, weights of Qwen3.5-0.8B's shape are made up (`--shape tiny`: to try this out).

    cold      one process computes a few prompts, and writes them to a cache directory in --dir
    cached    another one is asked for the same prompts: the files are in the system's page cache
    dropped   a third one: the system was asked to drop the files from it before each prompt. Loads are
              made here whatever they take; elsewhere the engine makes them if they beat computing

Each process first computes a prompt that is in no cache. The bytes read, and the share of the files
that was in the page cache, are measured. The exit status is 1 if a prompt was not loaded from where
it should be, or if any token differs from the computed ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import numpy as np
import xxhash

from pippin.backends.base import Load, StepPlan
from pippin.cache.tiers.pieces import Piece, pieces, read
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import build_loop
from pippin.messages import Submit, pack_tokens
from pippin.scheduler.loop import Loop
from pippin.startup.resolve import resolve
from pippin.types import SamplingParams

PHASES = ("cold", "cached", "dropped")
REPLY_TOKENS = 8
LEAST_TOKEN, MOST_TOKEN = 10, 5_000  # ids that every vocabulary here has
BLOCK_BYTES = 2 << 20  # as the store reads
GENERATIONS_APART = 1_000  # seeds of prompts that are computed in each process
COUNTED = ("loaded", "late_loads", "failed_loads", "declined_loads", "unreadable_entries")


class Engine:
    """A loop with a cache on disk, as the server's engine has one."""

    def __init__(self, options: argparse.Namespace) -> None:
        model = ModelConfig(str(options.model), backend=options.backend, dtype=options.dtype)
        engine = EngineConfig(
            cache_dir=str(options.dir / "cache"), disk=options.disk, canary=options.canary
        )
        began = perf_counter()
        self.loop: Loop = build_loop(resolve(Config(model, engine)), lambda _: None)
        while not self.loop.warm_up.done:
            self.loop.warm_up.run_next()
        self.load_seconds = perf_counter() - began
        self.traffic = self.loop.scheduler.traffic
        (self.tier,) = self.traffic.tiers
        self.reads: list[tuple[float, float, int]] = []  # asked, there, bytes
        self.launches: list[tuple[float, float]] = []  # of steps that load something
        self._note_reads()
        self._note_launches()

    def ask(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """The reply, greedily, and the time to its first token."""
        params = SamplingParams(max_tokens=REPLY_TOKENS, temperature=0.0, ignore_eos=True)
        self.reads.clear()
        self.launches.clear()
        reply: dict[str, Any] = {"tokens": []}
        began = perf_counter()
        self.loop.submit(Submit(name, pack_tokens(prompt), params))
        while "finish" not in reply:
            for delta in self.loop.step():
                if "ttft" not in reply:
                    reply["ttft"] = perf_counter() - began
                    reply["cached"] = delta.cached_tokens or 0
                    reply["disk"] = delta.disk_tokens
                reply["tokens"] += delta.tokens
                if delta.finish is not None:
                    reply["finish"] = delta.finish
                    reply["error"] = delta.error
        reply["stages"] = self._stages(began, reply["ttft"])
        return reply

    def write_behind(self) -> None:
        """All that the disk lacks, and until nothing is left to do."""
        while self.traffic.hurry() or not self.loop.idle:
            self.loop.step()

    def counters(self) -> dict[str, Any]:
        found: dict[str, Any] = self.traffic.counters()["disk"]
        return found

    def _stages(self, began: float, ttft: float) -> dict[str, float]:
        if not self.reads:
            return {}
        last_read = max(there for _, there, _ in self.reads)
        last_launch = max((end for _, end in self.launches), default=last_read)
        return {
            "until the first read": self.reads[0][0] - began,
            "until the last byte was read and verified": last_read - began,
            "until the last load was launched": last_launch - began,
            "until the first token": ttft,
            "of it launching loads": sum(end - start for start, end in self.launches),
        }

    def _note_reads(self) -> None:
        tier_io, read_piece = self.tier.tier_io, self.tier.tier_io.read

        def noted(piece: Piece, *rest: Any) -> Any:
            asked = perf_counter()
            future = read_piece(piece, *rest)
            future.add_done_callback(
                lambda _: self.reads.append((asked, perf_counter(), piece.nbytes))
            )
            return future

        tier_io.read = noted  # type: ignore[method-assign]

    def _note_launches(self) -> None:
        backend, launch = self.loop.backend, self.loop.backend.launch

        def noted(plan: StepPlan) -> Any:
            began = perf_counter()
            pending = launch(plan)
            if plan.load:
                self.launches.append((began, perf_counter()))
            return pending

        backend.launch = noted  # type: ignore[method-assign]


# ---- phases ---------------------------------------------------------------------------------


def make_prompt(seed: int, options: argparse.Namespace) -> list[int]:
    return np.random.default_rng(seed).integers(LEAST_TOKEN, MOST_TOKEN, options.prompt).tolist()


def run_phase(options: argparse.Namespace) -> dict[str, Any]:
    phase = options.phase
    engine = Engine(options)
    unknown = GENERATIONS_APART * (1 + PHASES.index(phase))
    computed = engine.ask("unknown", make_prompt(unknown, options))
    engine.write_behind()
    if phase == "dropped":
        engine.loop.scheduler.pace.compute_seconds = float  # type: ignore[method-assign]  # slow
    replies = []
    for number in range(options.rounds):
        if phase == "dropped":
            drop(options.dir / "cache")
        before = engine.counters()
        resident = resident_share(options.dir / "cache")
        reply = engine.ask(f"prompt {number}", make_prompt(number, options))
        engine.write_behind()
        after = engine.counters()
        reply["resident"] = resident
        reply["read_bytes"] = after["store"]["read_bytes"] - before["store"]["read_bytes"]
        reply["counted"] = {name: after[name] - before[name] for name in COUNTED}
        again = engine.ask(f"again {number}", make_prompt(number, options))
        engine.write_behind()
        reply["memory_ttft"] = again["ttft"]
        replies.append(reply)
    found = {
        "load_seconds": engine.load_seconds,
        "computed": computed,
        "replies": replies,
        "device": engine.loop.backend.device.name,
        "counters": engine.counters(),
    }
    if phase == "cached":
        found["alone"] = list(stages_alone(engine, make_prompt(0, options), options))
    engine.loop.close()
    return found


def run_child(phase: str, options: argparse.Namespace) -> dict[str, Any]:
    result = options.dir / f"{phase}.json"
    command = [sys.executable, __file__, *sys.argv[1:]]
    command += ["--phase", phase, "--dir", str(options.dir), "--model", str(options.model)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


# ---- the page cache -------------------------------------------------------------------------


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.data"))


def drop(directory: Path) -> None:
    """Ask the system to forget what it holds of these files in memory."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in data_files(directory):
        file = os.open(path, os.O_RDWR)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def resident_share(directory: Path) -> float | None:
    """How much of the files lies in the page cache; None where the system does not tell."""
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
    except (AttributeError, OSError):
        return None
    there = total = 0
    for path in data_files(directory):
        size = path.stat().st_size
        with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
            num_pages = -(-size // mmap.PAGESIZE)
            pages = (ctypes.c_ubyte * num_pages)()
            first = (ctypes.c_char * size).from_buffer(mapped)
            failed = mincore(ctypes.byref(first), ctypes.c_size_t(size), pages)
            del first
            if failed:
                return None
            there += int((np.frombuffer(pages, dtype=np.uint8) & 1).sum())
            total += num_pages
    return there / max(total, 1)


# ---- stages by themselves -------------------------------------------------------------------


def stages_alone(
    engine: Engine, prompt: list[int], options: argparse.Namespace
) -> Iterator[tuple[str, float, int]]:
    """Name, seconds and bytes of each part of a load, one after the other, nothing beside it."""
    threads = min(8, os.cpu_count() or 1)
    tiers, backend = engine.tier.tiers, engine.loop.backend
    wanted = pieces(tiers.below.cache.match_prompt(prompt), 0, tiers.batch_bytes)
    nbytes = sum(piece.nbytes for piece in wanted)
    held = backend.host_memory(nbytes)
    held[:] = 0
    path = max(data_files(options.dir / "cache"), key=lambda path: path.stat().st_size)
    for count in (1, threads):
        for what in ("read", "digest", "read and digest by blocks"):
            yield f"{what}, {count} threads", in_threads(path, held, count, what), nbytes
    specs = [tiers.format(piece.component, piece.num_tokens) for piece in wanted]
    buffers, at = [], 0
    for piece in wanted:
        buffers.append(held[at : at + piece.nbytes])
        at += piece.nbytes
    began = perf_counter()
    arrays: list[Any] = [
        read(engine.tier.tier_io.store, *each) for each in zip(wanted, specs, buffers, strict=True)
    ]
    yield "the store's pieces, one by one", perf_counter() - began, nbytes
    yield "host to device", copy_alone(options.backend, held), nbytes
    loads = [
        Load(piece.component, piece.num_tokens, found)
        for piece, found in zip(wanted, arrays, strict=True)
    ]
    for number, load in enumerate([loads[0], *loads]):
        if number == 1:  # the first is for compiling
            began = perf_counter()
        pending = backend.launch(StepPlan(-1_000_000 + number, load=(load,)))
        for payload in pending.wait().loaded:
            payload.release()
    yield "host to device and placed, a step each", perf_counter() - began, nbytes


def in_threads(path: Path, held: np.ndarray, count: int, what: str) -> float:
    """Seconds to read the file into all of `held`, again and again, or to digest it, or both."""
    blocks = [held[at : at + BLOCK_BYTES] for at in range(0, held.nbytes, BLOCK_BYTES)]
    num_in_file = max(path.stat().st_size // BLOCK_BYTES, 1)

    def work(number: int, block: np.ndarray) -> None:
        if "read" in what:
            os.preadv(file.fileno(), [block.data], number % num_in_file * BLOCK_BYTES)
        if "digest" in what:
            xxhash.xxh3_128().update(block.data)

    with path.open("rb") as file, ThreadPoolExecutor(count) as pool:
        began = perf_counter()
        list(pool.map(work, range(len(blocks)), blocks))
        return perf_counter() - began


def copy_alone(backend: str, held: np.ndarray) -> float:
    if backend == "torch":
        import torch

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        host = torch.from_numpy(held)
        target = torch.empty(held.nbytes, dtype=torch.uint8, device=device)
        for _ in range(2):
            began = perf_counter()
            target.copy_(host, non_blocking=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = perf_counter() - began
        return seconds
    import mlx.core as mx

    for _ in range(2):  # the first is a warm-up
        began = perf_counter()
        for at in range(0, held.nbytes, 32 << 20):
            mx.eval(mx.array(held[at : at + (32 << 20)]) + mx.array(0, dtype=mx.uint8))
        seconds = perf_counter() - began
    return seconds


# ---- output ---------------------------------------------------------------------------------


def show(name: str, found: dict[str, Any], prompt_len: int) -> None:
    replies = found["replies"]
    ttfts = ", ".join(f"{reply['ttft'] * 1e3:.1f}" for reply in replies)
    print(f"\n{name}: first token after {ttfts} ms; the median {ttft_of(found) * 1e3:.1f} ms")
    print(
        f"  engine made in {found['load_seconds']:.1f} s; a prompt in no cache: "
        f"{found['computed']['ttft'] * 1e3:.1f} ms; again, from memory: "
        f"{median(reply['memory_ttft'] for reply in replies) * 1e3:.1f} ms"
    )
    for reply in replies:
        gigabytes = reply["read_bytes"] / 1e9
        resident = reply["resident"]
        counted = ", ".join(f"{name} {n}" for name, n in reply["counted"].items() if n)
        print(
            f"  {reply['cached']:,} of {prompt_len:,} tokens cached, {reply['disk']:,} from disk; "
            f"{gigabytes:.3f} GB read, {gigabytes / reply['ttft']:.2f} GB/s to the first token; "
            f"{'?' if resident is None else f'{resident:.0%}'} of the files in the page cache; {counted}"
        )
        for stage, seconds in reply["stages"].items():
            print(f"    {seconds * 1e3:8.1f} ms  {stage}")


def ttft_of(found: dict[str, Any]) -> float:
    return median(reply["ttft"] for reply in found["replies"])


def judge(phases: dict[str, dict[str, Any]], options: argparse.Namespace) -> list[str]:
    """The faults found: one line each."""
    wrong = []
    cold = phases["cold"]["replies"]
    for phase, found in phases.items():
        for number, reply in enumerate(found["replies"]):
            what = f"{phase}, prompt {number}:"
            if reply["finish"] != "length":
                wrong.append(f"{what} ended with {reply['finish']} {reply['error']}")
            if phase == "cold":
                if reply["cached"] or reply["read_bytes"]:
                    wrong.append(f"{what} was not computed: {reply['cached']:,} tokens were cached")
                continue
            if reply["tokens"] != cold[number]["tokens"]:
                wrong.append(f"{what} {reply['tokens']} are not {cold[number]['tokens']}")
            if reply["disk"] < options.prompt - 128 or not reply["read_bytes"]:
                wrong.append(
                    f"{what} only {reply['disk']:,} tokens were loaded from disk: {reply['counted']}"
                )
            if phase == "dropped" and (reply["resident"] or 0.0) > 0.1:
                wrong.append(
                    f"{what} {reply['resident']:.0%} of the files stayed in the page cache"
                )
    return wrong


def compare(options: argparse.Namespace) -> int:
    options.dir.mkdir(parents=True, exist_ok=True)
    if data_files(options.dir / "cache"):
        print(f"{options.dir} has a cache in it already: prompts would not be computed")
        return 1
    if options.model is None:
        options.model = options.dir / "model"
        if not options.model.exists():
            import make_random_hybrid

            make_random_hybrid.write_model(
                options.model, options.shape, options.prompt + 4 * REPLY_TOKENS
            )
    phases: dict[str, dict[str, Any]] = {}
    for phase in PHASES:
        phases[phase] = run_child(phase, options)
        show(phase, phases[phase], options.prompt)
    print(f"\nof {phases['cached']['device']}, {options.backend}, {options.prompt:,} tokens:")
    for name, seconds, nbytes in phases["cached"]["alone"]:
        print(f"  {seconds * 1e3:8.1f} ms  {nbytes / seconds / 1e9:6.2f} GB/s  {name}")
    cold = ttft_of(phases["cold"])
    for phase in PHASES[1:]:
        print(f"{phase}: {ttft_of(phases[phase]) / cold:.1%} of the time of computing")
    wrong = judge(phases, options)
    same = "differ" if any(" are not " in each for each in wrong) else "are the computed ones"
    print(f"tokens {same}")
    for each in wrong:
        print(f"NOT AS IT SHOULD BE: {each}")
    return int(bool(wrong))


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=("torch", "mlx"), default="torch")
    parser.add_argument("--model", type=Path, help="a checkpoint; default: one is made")
    parser.add_argument("--shape", choices=("0.8b", "tiny"), default="0.8b", help="of the one made")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=32_768, help="tokens")
    parser.add_argument("--rounds", type=int, default=3, help="prompts")
    parser.add_argument("--disk", default="24GB", help="ceiling of the cache directory")
    parser.add_argument("--canary", default="off")
    parser.add_argument(
        "--dir", type=Path, help="where model and cache go, and stay; default: a temporary one"
    )
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_options()
    if options.phase is not None:
        found = run_phase(options)
        (options.dir / f"{options.phase}.json").write_text(json.dumps(found), encoding="utf-8")
        return 0
    if options.dir is not None:
        return compare(options)
    with tempfile.TemporaryDirectory() as folder:
        options.dir = Path(folder)
        return compare(options)


if __name__ == "__main__":
    sys.exit(main())
