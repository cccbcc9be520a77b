"""Hundreds of open streams for a while, on Pippin and on mlx-lm's server: who is served, how evenly.

    python tools/open_streams.py [--streams 500] [--seconds 60] [--max-tokens 100]

Both serve the bundled model with their default options: Pippin runs 64 requests at a time. Every
client keeps one stream open and opens the next as soon as it has ended. Requests are greedy, with
prompts of a few words. Figures are of streams that ended; gaps are between events of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

import pippin
from pippin.bench.servers.processes import mlx_lm_server, pippin_server

MODEL = "stories-hybrid-20m"
REQUEST_SECONDS = 300.0


@dataclass
class Figures:
    ends: Counter[str] = field(default_factory=Counter)
    first: list[float] = field(default_factory=list)  # seconds to the first event with text
    gaps: list[float] = field(default_factory=list)
    tokens: int = 0
    served: set[int] = field(default_factory=set)  # clients with a reply

    def show(self, seconds: float, streams: int) -> None:
        print(f"{streams} clients for {seconds:.0f} s: ends {dict(self.ends.most_common())}")
        print(f"clients with a whole reply: {len(self.served)}; events with text: {self.tokens:,}, "
              f"{self.tokens / seconds:,.0f}/s")
        for name, values in (("first text", self.first), ("gap", self.gaps)):
            if values:
                p50, p99 = np.percentile(values, (50, 99))
                print(f"{name}: median {p50:.3f} s, 99% {p99:.3f} s, longest {max(values):.3f} s")


async def client(
    number: int, http: httpx.AsyncClient, body: dict[str, object], figures: Figures, until: float
) -> None:
    while time.monotonic() < until:
        asked = {**body, "prompt": f"{number}. Once upon a time there was a"}
        try:
            end = await stream(number, http, asked, figures)
        except httpx.HTTPError as error:
            end = type(error).__name__
        figures.ends[end] += 1
        if end != "finished":
            await asyncio.sleep(1.0)


async def stream(
    number: int, http: httpx.AsyncClient, body: dict[str, object], figures: Figures
) -> str:
    last = time.monotonic()
    num_events = 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            return f"status {answer.status_code}"
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return "error event"
            if not any(choice.get("text") for choice in event.get("choices", ())):
                continue
            now = time.monotonic()
            (figures.gaps if num_events else figures.first).append(now - last)
            last, num_events = now, num_events + 1
            figures.tokens += 1
    figures.served.add(number)
    return "finished" if num_events else "empty"


async def run(url: str, model: str, streams: int, seconds: float, max_tokens: int) -> None:
    figures = Figures()
    limits = httpx.Limits(max_connections=None)
    body = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_SECONDS, limits=limits) as http:
        until = time.monotonic() + seconds
        clients = [
            asyncio.create_task(client(number, http, body, figures, until))
            for number in range(streams)
        ]
        await asyncio.sleep(seconds)
        figures.show(seconds, streams)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-tokens", type=int, default=100)
    args = parser.parse_args()
    for name, opened in (
        ("Pippin", pippin_server(MODEL)),
        ("mlx-lm", mlx_lm_server(Path(pippin.__file__).parent / "models" / MODEL)),
    ):
        with opened as server:
            print(f"{name}: ", end="", flush=True)
            asyncio.run(
                run(server.url, server.model, args.streams, args.seconds, args.max_tokens)
            )


if __name__ == "__main__":
    main()
