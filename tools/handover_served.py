"""Prompts of two servers, one that computes them and one that decodes: what a client waits, what each engine does.

    python tools/handover_served.py MODEL --backend torch --tokens 32768 --memory 40GB
    python tools/handover_served.py                        the bundled model on this machine's CPU

Starts `pippin serve --role prefill` and `--role decode` on loopback; on a GPU both use the same one, with a share of
its memory each. Every prompt of random tokens is computed by the first for a client of its own, and handed over to
the second, in turn, with empty caches. Prints the time to the first token of both, the bytes, the processor time of
the decode engine, and how many tokens of both replies are equal. Then two streams run at the second: gaps between
their events alone, beside prompts that the first computes for its own clients, beside prompts that are handed over,
and beside prompts that the second computes itself. Exit status 1 if a prompt was not handed over.

Options of `pippin serve`, for both, stand at the end: `-- --deterministic --prefill-tokens 2048`. Random weights:
`tools/make_random_hybrid.py DIR --max-len 40960` writes Qwen3.5-0.8B's shape. Its tokens may differ between a prompt
in chunks of one length and of another, where `--deterministic` is not given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import pippin
from pippin.bench.client.wire import Target
from pippin.bench.servers.processes import free_port, pippin_server

BUNDLED = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
REPLY_TOKENS = 32
CONNECT_SECONDS = 30.0
STREAMS, STREAM_TOKENS = 2, 4_000
QUIET_SECONDS = 2.0  # of streams alone
LEAST_TOKEN = 3  # of prompts: those before it are special


@dataclass(frozen=True)
class Reply:
    first: float  # seconds to its first token
    tokens: list[str]
    handed_over: int  # tokens of its prompt


class Server:
    def __init__(self, target: Target) -> None:
        self._model = target.model
        self._client = httpx.Client(base_url=target.url, timeout=600)

    def ask(self, prompt: list[int]) -> Reply:
        body = {"stream_options": {"include_usage": True}, "logprobs": 0}
        first, tokens, handed_over = 0.0, [], 0
        began = time.perf_counter()
        for event in self._events(prompt, REPLY_TOKENS, body):
            for choice in event["choices"]:
                first = first or time.perf_counter() - began
                tokens += (choice["logprobs"] or {"tokens": []})["tokens"]
            if event.get("usage"):
                handed_over = event["usage"]["prompt_tokens_details"].get("peer_cached_tokens", 0)
        return Reply(first, tokens, handed_over)

    def gaps(self, prompt: list[int], stop: threading.Event) -> list[float]:
        """Seconds between the events of a stream, until it is stopped."""
        times: list[float] = []
        for _ in self._events(prompt, STREAM_TOKENS, {}):
            times.append(time.perf_counter())
            if stop.is_set():
                break
        return [after - before for before, after in itertools.pairwise(times)]

    def _events(
        self, prompt: list[int], max_tokens: int, more: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0, **more}
        with self._client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"{answer.status_code}: {answer.read().decode()}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def flush(self) -> None:
        self._client.post("/flush_cache").raise_for_status()

    def get(self, path: str) -> dict[str, Any]:
        return dict(self._client.get(path).raise_for_status().json())

    def wait_for_peer(self) -> None:
        end = time.monotonic() + CONNECT_SECONDS
        while not (peer := self.get("/status")["peer"])["num_connected"]:
            if time.monotonic() > end:
                raise SystemExit(f"not connected: {peer['peers']}")
            time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=str(BUNDLED), help="a directory")
    parser.add_argument("--backend", default="mlx")
    parser.add_argument("--tokens", type=int, default=2_000, help="of each prompt")
    parser.add_argument("--prompts", type=int, default=4, help="after one that warms up")
    parser.add_argument("--memory", default="1GB", help="of each engine")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    common = ["--backend", args.backend, "--memory", args.memory, *sys.argv[at + 1 :]]
    address = f"tcp://127.0.0.1:{free_port()}"
    receive = ["--role", "decode", "--peer", address, "--peer-memory", "4GB"]
    began = time.perf_counter()
    with ExitStack() as prefills, ExitStack() as decodes:
        send = ["--role", "prefill", "--peer-listen", address]
        prefill = Server(prefills.enter_context(pippin_server(args.model, [*send, *common])))
        decode = Server(decodes.enter_context(pippin_server(args.model, [*receive, *common])))
        decode.wait_for_peer()
        print(f"both servers started in {time.perf_counter() - began:.0f} s", flush=True)
        rng, vocab_size = random.Random(1), prefill.get("/get_model_info")["vocab_size"]
        prompts = [
            [rng.randrange(LEAST_TOKEN, vocab_size) for _ in range(args.tokens)]
            for _ in range(1 + args.prompts)
        ]
        measure(prefill, decode, prompts[:1], quiet=True)
        whole = measure(prefill, decode, prompts[1:])
        gaps_of_streams(decode, "no prompt", decode, [])
        for server in (prefill, decode):
            server.flush()
        gaps_of_streams(decode, "prompts of the prefill engine's clients", prefill, prompts[:2])
        prefill.flush()
        gaps_of_streams(decode, "prompts handed over", decode, prompts[:2])
        prefills.close()
        decode.flush()
        gaps_of_streams(decode, "prompts computed by the decode engine", decode, prompts[:2])
        return 0 if whole else 1


def measure(prefill: Server, decode: Server, prompts: list[list[int]], *, quiet: bool = False) -> bool:
    """Whether all were handed over: whole, or with --deterministic as whole blocks."""
    whole, added = True, []
    for prompt in prompts:
        prefill.flush()
        local = prefill.ask(prompt)
        prefill.flush()
        before = decode.get("/status")
        there = decode.ask(prompt)
        after = decode.get("/status")
        cached = prefill.ask(prompt)
        whole &= there.handed_over > len(prompt) - 1_024
        pairs = zip(local.tokens, there.tokens, strict=False)
        num_equal = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        arrived = [one["peer"]["handovers"]["arrived_bytes"] for one in (before, after)]
        added.append(there.first - local.first)
        if not quiet:
            print(
                f"first token: computed {local.first * 1e3:,.0f} ms, handed over {there.first * 1e3:,.0f} ms "
                f"({added[-1] * 1e3:+,.0f}), cached {cached.first * 1e3:,.0f} ms; {there.handed_over:,} tokens, "
                f"{(arrived[1] - arrived[0]) / 1e6:,.1f} MB; processor time of the decode engine "
                f"{(after['cpu_seconds'] - before['cpu_seconds']) * 1e3:,.0f} ms; "
                f"{num_equal} of {len(local.tokens)} tokens equal",
                flush=True,
            )
    if not quiet:
        print(f"handed over, the first token is {statistics.median(added) * 1e3:+,.0f} ms later (median)")
    return whole


def gaps_of_streams(decode: Server, name: str, other: Server, prompts: list[list[int]]) -> None:
    """Of streams at the decode engine, while prompts arrive at one of both, one after the other."""
    stop, found = threading.Event(), list[list[float]]()
    threads = [
        threading.Thread(target=lambda at=at: found.append(decode.gaps([at, *range(5, 20)], stop)))
        for at in range(LEAST_TOKEN, LEAST_TOKEN + STREAMS)
    ]
    for thread in threads:
        thread.start()
    time.sleep(QUIET_SECONDS)
    for prompt in prompts:
        other.ask(prompt)
    stop.set()
    for thread in threads:
        thread.join()
    gaps = sorted(itertools.chain(*found))
    print(
        f"{STREAMS} streams, {name}: gaps of {statistics.median(gaps) * 1e3:,.1f} ms, "
        f"99% of them up to {gaps[len(gaps) * 99 // 100] * 1e3:,.1f}, the longest {gaps[-1] * 1e3:,.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
