"""Clients that switch between models at random, in memory for one: what failed, and who waited.

    python tools/switch_models.py --seconds 600 --clients 12 --models 3

Starts `pippin serve` with copies of the bundled model under several names. Every client streams a
reply of a random length from a random model, reads it to its end, and goes on. A stream without
its last event counts as cut.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

BUNDLED = Path(__file__).parents[1] / "src/pippin/models/stories-hybrid-20m"
START_SECONDS = 300


@dataclass
class Tally:
    replies: int = 0
    tokens: int = 0
    waits: list[float] = field(default_factory=list)  # to the first token
    errors: list[str] = field(default_factory=list)
    cut: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--memory", default="250MB", help="for all models together")
    parser.add_argument("--turn", type=float, default=10.0)
    parser.add_argument("--port", type=int, default=8790)
    parser.add_argument("--backend", default="mlx")
    options = parser.parse_args()
    names = [f"model-{number}" for number in range(options.models)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [shutil.copytree(BUNDLED, Path(folder, name)) for name in names]
        command = [sys.executable, "-m", "pippin", "serve", *map(str, paths)]
        given = {"port": options.port, "memory": options.memory, "model-turn": options.turn}
        for name, value in {**given, "backend": options.backend}.items():
            command += [f"--{name}", str(value)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{options.port}"
        try:
            _wait(url)
            tallies = _run(url, names, options.clients, options.seconds)
            loads = _loads(url)
        finally:
            server.terminate()
            server.wait()
    _print(tallies, loads, options.seconds)


def _wait(url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            httpx.get(f"{url}/health", timeout=10).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise SystemExit("the server did not start")


def _run(url: str, names: list[str], num_clients: int, seconds: float) -> dict[str, Tally]:
    tallies = {name: Tally() for name in names}
    lock = threading.Lock()
    end = time.monotonic() + seconds

    def client(seed: int) -> None:
        chance = random.Random(seed)
        with httpx.Client(timeout=600) as http:
            while time.monotonic() < end:
                name = chance.choice(names)
                _ask(http, url, name, chance, tallies[name], lock)
                time.sleep(chance.uniform(0.0, 1.0))

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tallies


def _ask(
    http: httpx.Client,
    url: str,
    name: str,
    chance: random.Random,
    tally: Tally,
    lock: threading.Lock,
) -> None:
    body = {
        "model": name,
        "messages": [{"role": "user", "content": f"Tell me a story, {chance.random()}."}],
        "max_tokens": chance.choice([8, 32, 128]),
        "stream": True,
    }
    began, first, tokens, done, error = time.monotonic(), None, 0, False, ""
    try:
        with http.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                error = f"{reply.status_code}: {reply.read().decode()[:200]}"
            for line in reply.iter_lines() if not error else ():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    error = error or str(chunk.get("error") or "")
                    assert error or chunk["model"] == name, chunk
                    first = first or time.monotonic()
                    tokens += 1
    except httpx.HTTPError as failure:
        error = repr(failure)
    with lock:
        tally.replies += done and not error
        tally.tokens += tokens
        tally.cut += not done and not error
        if error:
            tally.errors.append(error)
        if first is not None:
            tally.waits.append(first - began)


def _loads(url: str) -> dict[str, int]:
    status = httpx.get(f"{url}/status", timeout=60).json()
    return {name: model["num_loads"] for name, model in status["models"].items()}


def _print(tallies: dict[str, Tally], loads: dict[str, int], seconds: float) -> None:
    print(f"{seconds:g} s; seconds to the first token, with the wait for a load\n")
    print("| model | replies | events | loads | median | p95 | longest | errors | cut |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, tally in tallies.items():
        waits = sorted(tally.waits) or [0.0]
        shown = (statistics.median(waits), waits[int(0.95 * (len(waits) - 1))], waits[-1])
        times = " | ".join(f"{wait:.1f}" for wait in shown)
        counts = f"{tally.replies} | {tally.tokens} | {loads[name]}"
        print(f"| {name} | {counts} | {times} | {len(tally.errors)} | {tally.cut} |")
    served = [tally.replies for tally in tallies.values()]
    print(f"\nfairness: the model with the fewest replies had {min(served) / max(served):.0%} of")
    print(f"the one with the most; loads in all: {sum(loads.values())}")
    for error in sorted({error for tally in tallies.values() for error in tally.errors})[:10]:
        print("error:", error)
    if any(tally.errors or tally.cut for tally in tallies.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
