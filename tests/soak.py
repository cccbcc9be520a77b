"""A server under mixed load while its engine is killed and frozen. Knows the API alone.

Clients of every kind ask without a pause, and some of them leave. Every `KILL_SECONDS` the engine
gets SIGKILL or SIGSTOP, in turn. What must hold all the while:

- every request ends exactly once: with a reply, or with one error;
- a greedy probe says what it said to a fresh server;
- the probe that is asked as the engine is killed is answered, by the next engine;
- the server's memory does not grow;
- grammars that ask for more than their text shows are replied to or refused: no engine is lost
  because of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from hostile_grammars import draw_hostile
from near_ties import count_same
from pippin.types import TokenLogprobs
from processes import Served, children_of, serve

CLIENTS = 12
KILL_SECONDS = 20.0
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
PROBE_SECONDS = 1.0  # between probes
HOSTILE_SECONDS = 0.5  # between grammars of hostile clients
REQUEST_SECONDS = 120.0  # longer means that it never ends
TIGHT = ("--memory", "300MB", "--max-running", "6", "--max-queue", "64")
STORY = (
    "once upon a time there was a little girl who had a big red ball and a small brown dog they "
    "liked to play in the park every day one day the ball rolled away into the dark wood the girl "
    "was very sad but the dog ran fast and found it under a tall old tree"
)
WORDS = STORY.split()
BEGINNING = [WORDS[i * i % len(WORDS)] for i in range(200)]  # that many prompts share
PROBES = ("Once upon a time", "The little dog", "Tom and Mia went to the park. They")


class BrokenPromise(AssertionError):
    pass


@dataclass(frozen=True)
class ProbeReply:
    """Tokens as their text; `near_ties` asks only whether they are the same."""

    tokens: list[Any]
    logprobs: list[TokenLogprobs]

    @classmethod
    def of(cls, answer: dict[str, Any]) -> ProbeReply:
        scored = answer["choices"][0]["logprobs"]
        tops = [tuple(top.items()) for top in scored["top_logprobs"]]
        return cls(
            scored["tokens"],
            [
                TokenLogprobs(own, tuple(t for t, _ in top), tuple(x for _, x in top))
                for own, top in zip(scored["token_logprobs"], tops, strict=True)
            ],
        )


@dataclass
class Report:
    ends: Counter[str] = field(default_factory=Counter)
    recoveries: list[tuple[str, float]] = field(default_factory=list)  # signal, seconds
    probes: int = 0
    probe_tokens: int = 0
    same_tokens: int = 0
    server_mb: list[tuple[float, float]] = field(default_factory=list)  # at, resident
    engine_mb: list[tuple[float, float]] = field(default_factory=list)
    hostile: Counter[str] = field(default_factory=Counter)  # by how they ended
    engine_pids: set[int] = field(default_factory=set)

    @property
    def num_lost_otherwise(self) -> int:
        """Engines that ended without a signal of ours."""
        return max(0, len(self.engine_pids) - 1 - len(self.recoveries))

    @property
    def growth_mb(self) -> float:
        """Of the server's resident memory: the last quarter's median against the second's."""
        sizes = [size for _, size in self.server_mb]
        quarter = len(sizes) // 4
        return float(np.median(sizes[-quarter:]) - np.median(sizes[quarter : 2 * quarter]))

    def lines(self) -> list[str]:
        ends = ", ".join(f"{count:,} {name}" for name, count in self.ends.most_common())
        seconds = [taken for _, taken in self.recoveries]
        return [
            f"requests: {sum(self.ends.values()):,}, each ended once ({ends})",
            f"engines lost: {len(seconds)}; served again after {np.median(seconds):.1f} s "
            f"(median), {max(seconds):.1f} s (longest): "
            + ", ".join(f"{name} {taken:.1f}" for name, taken in self.recoveries),
            f"hostile grammars: {sum(self.hostile.values()):,} ("
            + ", ".join(f"{count:,} {name}" for name, count in self.hostile.most_common())
            + f"); engines lost besides those that were killed: {self.num_lost_otherwise}",
            f"greedy probes: {self.probes}, {self.same_tokens} of {self.probe_tokens} tokens as a "
            "fresh server's, the others after a tie",
            f"server's memory: {self.server_mb[0][1]:.0f} MB at first, {self.server_mb[-1][1]:.0f} "
            f"MB at last, {self.growth_mb:+.1f} MB since the second quarter; engines at most "
            f"{max(size for _, size in self.engine_mb):.0f} MB",
        ]


@contextmanager
def serving(*options: str) -> Iterator[Served]:
    with serve(*TIGHT, *options) as served:
        yield served
        served.process.terminate()
        assert served.process.wait(REQUEST_SECONDS) == 0


class Soak:
    def __init__(self, server: Served, seconds: float, kill_seconds: float, seed: int = 0) -> None:
        self.report = Report()
        self._server = server
        self._seconds = seconds
        self._kill_seconds = kill_seconds
        self._random = random.Random(seed)
        self._http = httpx.AsyncClient(
            base_url=server.url,
            timeout=None,
            limits=httpx.Limits(max_connections=None),
        )
        self._expected: dict[str, ProbeReply] = {}
        self._began = time.monotonic()

    async def run(self) -> Report:
        async with self._http:
            for prompt in PROBES:
                self._expected[prompt] = await self._ask_probe(prompt)
            self._began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(self._client())
                group.create_task(self._probe())
                group.create_task(self._attack())
                group.create_task(self._measure())
                group.create_task(self._kill())
            await self._check_that_nothing_is_left()
        return self.report

    @property
    def _engine_pid(self) -> int | None:
        """None: there is none at the moment."""
        return next(iter(children_of(self._server.process.pid)), None)

    @property
    def _over(self) -> bool:
        """Time is up, and each signal was tried, which on a busy machine may take longer."""
        tried = len(self.report.recoveries) >= len(SIGNALS)
        return tried and time.monotonic() - self._began > self._seconds

    # ---- clients ---------------------------------------------------------------------------

    async def _client(self) -> None:
        while not self._over:
            draw = self._random
            body = self._body()
            leaves = draw.random() < 0.15
            patience = draw.random() ** 2 * 2.0
            asking = self._stream(body) if body.get("stream") else self._whole(body)
            try:
                async with asyncio.timeout(patience if leaves else REQUEST_SECONDS):
                    end = await asking
            except TimeoutError:
                if not leaves:
                    status = (await self._http.get("/status")).text
                    raise BrokenPromise(f"{body} never ended; {status}") from None
                end = "left"
            self.report.ends[end] += 1
            if end.startswith("refused"):
                await asyncio.sleep(0.1)

    def _body(self) -> dict[str, Any]:
        draw = self._random
        words = draw.choices(WORDS, k=int(3 * 80 ** draw.random()))
        if draw.random() < 0.5:
            words = BEGINNING[: draw.randrange(20, 200)] + words
        return {
            "model": "stories-hybrid-20m",
            "prompt": " ".join(words),
            "max_tokens": draw.randrange(1, 120),
            "n": draw.choice((1, 1, 1, 2)),
            "stream": draw.random() < 0.7,
            "temperature": draw.choice((0.0, 1.0)),
            "ignore_eos": True,
        }

    async def _whole(self, body: dict[str, Any]) -> str:
        answer = await self._http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return _error_end(answer.status_code, answer.json())
        reasons = [choice["finish_reason"] for choice in answer.json()["choices"]]
        if reasons != ["length"] * body["n"]:
            raise BrokenPromise(f"{body['n']} choices ended as {reasons}")
        return "finished"

    async def _stream(self, body: dict[str, Any]) -> str:
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return _error_end(answer.status_code, json.loads(await answer.aread()))
            events = [line[6:] async for line in answer.aiter_lines() if line[:6] == "data: "]
        if events.count("[DONE]") != 1 or events[-1] != "[DONE]":
            raise BrokenPromise(f"a stream ended with {events[-2:]}")
        said = [json.loads(event) for event in events[:-1]]
        errors = [event for event in said if "error" in event]
        reasons = [
            choice["finish_reason"]
            for event in said
            for choice in event.get("choices", ())
            if choice["finish_reason"] is not None
        ]
        if errors:
            if len(errors) > 1 or said[-1] is not errors[0]:
                raise BrokenPromise(f"a stream went on after an error: {said[-2:]}")
            return _error_end(200, errors[0])
        if reasons != ["length"] * body["n"]:
            raise BrokenPromise(f"{body['n']} choices ended as {reasons}")
        return "finished"

    # ---- probes ----------------------------------------------------------------------------

    async def _probe(self) -> None:
        while not self._over:
            for prompt in PROBES:
                self._compare(prompt, await self._ask_probe(prompt))
                await asyncio.sleep(PROBE_SECONDS)

    async def _ask_probe(self, prompt: str) -> ProbeReply:
        """Asked until it is answered."""
        body = {
            "model": "stories-hybrid-20m",
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0,
            "logprobs": 5,
            "priority": 1,
        }
        async with asyncio.timeout(REQUEST_SECONDS):
            while True:
                answer = await self._http.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    self.report.ends["finished"] += 1
                    return ProbeReply.of(answer.json())
                self.report.ends[_error_end(answer.status_code, answer.json())] += 1
                await asyncio.sleep(0.05)

    def _compare(self, prompt: str, reply: ProbeReply) -> None:
        expected = self._expected[prompt]
        self.report.probes += 1
        self.report.probe_tokens += len(expected.tokens)
        self.report.same_tokens += count_same(reply.tokens, expected)

    # ---- hostile grammars ------------------------------------------------------------------

    async def _attack(self) -> None:
        while not self._over:
            spec = draw_hostile(self._random)
            body = {"model": "stories-hybrid-20m", "prompt": "Once", "max_tokens": 4}
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await self._http.post(
                    "/v1/completions", json=body | {spec.kind: spec.text}
                )
            if answer.status_code == 400:
                end = "refused (400)"
            elif answer.status_code == 200:
                end = "finished"
            else:
                end = _error_end(answer.status_code, answer.json())
            self.report.hostile[end] += 1
            await asyncio.sleep(HOSTILE_SECONDS)

    # ---- trouble ---------------------------------------------------------------------------

    async def _kill(self) -> None:
        for number in itertools.cycle(SIGNALS):
            since = time.monotonic()
            while time.monotonic() - since < self._kill_seconds:
                await asyncio.sleep(0.5)
                if self._over:
                    return
            async with asyncio.timeout(REQUEST_SECONDS):
                while (pid := self._engine_pid) is None:  # it was taken for one that hangs
                    await asyncio.sleep(0.1)
            os.kill(pid, number)
            began = time.monotonic()
            self._compare(PROBES[0], await self._ask_probe(PROBES[0]))
            self.report.recoveries.append((number.name, time.monotonic() - began))

    async def _measure(self) -> None:
        while not self._over:
            await asyncio.sleep(1.0)
            at = time.monotonic() - self._began
            if (size := _resident_mb(self._server.process.pid)) is None:
                raise BrokenPromise("the server is gone")
            self.report.server_mb.append((at, size))
            pid = self._engine_pid
            if pid is not None:
                self.report.engine_pids.add(pid)
            if pid is not None and (size := _resident_mb(pid)) is not None:
                self.report.engine_mb.append((at, size))

    async def _check_that_nothing_is_left(self) -> None:
        """Whoever left, or was cut off, holds nothing once the step that retires it has ended."""
        status: dict[str, Any] = {}
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                while not _is_empty(status):
                    await asyncio.sleep(0.1)
                    answer = await self._http.get("/status")
                    status = answer.json() if answer.status_code == 200 else {}
        except TimeoutError as error:
            raise BrokenPromise(f"something is left: {status}") from error


def _error_end(status: int, body: dict[str, Any]) -> str:
    """An error that a client must expect from such a server."""
    code = body["error"]["code"]
    if code in ("not_ready", "overloaded"):
        return f"refused ({code})"
    if code == "engine_dead":
        return "cut off (engine_dead)"
    raise BrokenPromise(f"an error that nobody should see, {status}: {body}")


def _resident_mb(pid: int) -> float | None:
    """None: there is no such process."""
    said = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    return int(said.stdout) / 1024 if said.stdout.strip() else None


async def soak(
    seconds: float, heartbeat_timeout: int, kill_seconds: float = KILL_SECONDS
) -> Report:
    with serving("--heartbeat-timeout", str(heartbeat_timeout)) as server:
        return await Soak(server, seconds, kill_seconds).run()


def _is_empty(status: dict[str, Any]) -> bool:
    return bool(status) and not (
        status["running"] or status["waiting"] or status["memory"]["claimed_bytes"]
    )
