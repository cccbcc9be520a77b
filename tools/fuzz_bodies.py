"""Sends hostile bodies to a real server, one after the other, and reports what they cost it.

    python tools/fuzz_bodies.py [--number 2000] [--seed 1] [--no-grammars] [--only PATH]

Of every body: an answer below 500, and no more than a second of CPU in the HTTP server or in the
engine, besides what the tokens of the request take. Of all: the same engine, no growth, and a normal
request answered as before. The bodies are in tests/hostile_bodies.py. Linux: reads /proc.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from hostile_bodies import LARGEST, Hostile, hostile_bodies  # noqa: E402
from processes import children_of, serve  # noqa: E402

MOST_CPU_SECONDS = 1.0
HTTP_TOKEN_SECONDS = 20e-6  # for a token of a prompt or a reply: encoded, echoed, sent
WARM_AFTER = 200  # bodies, from where on memory must not grow
MOST_GROWTH_MB = 128  # of one process: the store of responses alone may take 64
ANSWER_SECONDS = 120.0
CONTEXT_TOKENS = 8192  # of the bundled model
NORMAL = {"model": "", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
PROMPT_WORDS = 1_000  # of the prompt whose cost is the measure of a token's


@dataclass
class Answer:
    status: int  # 0: there was none
    tokens: int  # computed for it, in prompts and replies
    http_s: float  # CPU seconds
    engine_s: float


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process = process
        self.pid = process.pid
        self.address = urlsplit(url).netloc
        self.engine = self._engine()

    @cached_property
    def model(self) -> str:
        return self.get("/v1/models")["data"][0]["id"]

    def _engine(self) -> int:
        """The child that has computed most: others watch, or compile."""
        return max(children_of(self._process.pid), key=rss_mb)

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection(self.address, timeout=ANSWER_SECONDS)
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())

    def send(self, path: str, body: bytes) -> tuple[Answer, bytes]:
        before = self._cpu()
        connection = http.client.HTTPConnection(self.address, timeout=ANSWER_SECONDS)
        status, answer = 0, b""
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            reply = connection.getresponse()
            status, answer = reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            answer = repr(error).encode()
        finally:
            connection.close()
        after = self._cpu()
        http_s, engine_s = (b - a for a, b in zip(before, after, strict=True))
        # Ollama's embeddings do not say how long a prompt was: as long as the context, at most.
        unsaid = CONTEXT_TOKENS if status == 200 and path.startswith("/api/embed") else 0
        return Answer(status, _tokens_of(answer) or unsaid, http_s, engine_s), answer

    def rss(self) -> dict[str, float]:
        return {"http": rss_mb(self._process.pid), "engine": rss_mb(self.engine)}

    def is_whole(self) -> bool:
        return self._process.poll() is None and self._engine() == self.engine

    def _cpu(self) -> tuple[float, float]:
        """Of the HTTP process, and of all its children: some compile grammars."""
        children = children_of(self._process.pid)
        return cpu_s(self._process.pid), sum(map(cpu_s, children))


def cpu_s(pid: int) -> float:
    """A child that is gone by now is in its parent's fields of children that it waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _tokens_of(answer: bytes) -> int:
    """All that the usage of a reply, or of several, counts."""
    names = rb'"(?:prompt_tokens|completion_tokens|input_tokens|output_tokens)":\s*(\d+)'
    return sum(int(number) for number in re.findall(names, answer))


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    with serve("--memory", "300MB", *options, stderr=subprocess.DEVNULL) as served:
        yield Server(served.process, served.url)
        served.process.terminate()
        served.process.wait(ANSWER_SECONDS)


def token_cost(server: Server) -> float:
    """CPU seconds of the engine for a token of a prompt, everything compiled."""
    costs = []
    for letter in "ab":
        prompt = " ".join(f"{letter}{i}" for i in range(PROMPT_WORDS))
        body = {"model": server.model, "prompt": prompt, "max_tokens": 1}
        answer, told = server.send("/v1/completions", json.dumps(body).encode())
        assert answer.status == 200, told
        costs.append(answer.engine_s / answer.tokens)
    return costs[-1]


def normal_reply(server: Server) -> str:
    body = json.dumps(NORMAL | {"model": server.model}).encode()
    answer, told = server.send("/v1/completions", body)
    return json.loads(told)["choices"][0]["text"] if answer.status == 200 else repr(told)


def fuzz(server: Server, bodies: Iterator[Hostile], verbose: bool) -> list[str]:
    """The faults."""
    faults: list[str] = []
    statuses: Counter[int] = Counter()
    slowest: list[tuple[float, str]] = []
    per_token, expected, warm = token_cost(server), normal_reply(server), server.rss()
    for number, hostile in enumerate(bodies):
        if number == WARM_AFTER:
            warm = server.rss()
        answer, told = server.send(hostile.path, hostile.body)
        engine_s = max(0.0, answer.engine_s - 2 * per_token * answer.tokens)
        http_s = max(0.0, answer.http_s - HTTP_TOKEN_SECONDS * answer.tokens)
        spent = max(http_s, engine_s)
        what = (
            f"{number}: {hostile.path} of {len(hostile.body):,} bytes ({hostile.what[:200]}): "
            f"{answer.status}, http {http_s:.2f} s, engine {engine_s:.2f} s"
        )
        if verbose or number % WARM_AFTER == 0:
            print(what, flush=True)
        statuses[answer.status] += 1
        slowest = sorted([*slowest, (spent, what)], reverse=True)[:8]
        if answer.status == 0 or answer.status >= 500 or spent > MOST_CPU_SECONDS:
            faults.append(f"{what}: {told[:300]!r}")
            print("fault", faults[-1], flush=True)
    last = server.rss()
    print("statuses:", dict(sorted(statuses.items())))
    print(*(f"slowest: {line}" for _, line in slowest), sep="\n")
    print("MB, warm and at the end:", warm, last)
    if not server.is_whole():
        faults.append("the server or its engine was lost")
    if (reply := normal_reply(server)) != expected:
        faults.append(f"the reply to a normal request was {expected!r}, and is {reply!r}")
    grown = [name for name in warm if last[name] - warm[name] > MOST_GROWTH_MB]
    return faults + [f"the {name} process grew by more than {MOST_GROWTH_MB} MB" for name in grown]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--number", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-grammars", action="store_true", help="send nothing that is compiled")
    parser.add_argument("--only", help="bodies of this path alone")
    parser.add_argument("--verbose", action="store_true", help="a line for each body")
    given = parser.parse_args()
    with serving() as server:
        bodies = hostile_bodies(
            server.get("/openapi.json"),
            server.model,
            given.number,
            seed=given.seed,
            grammars=not given.no_grammars,
            largest=LARGEST,
        )
        kept = (body for body in bodies if given.only in (None, body.path))
        faults = fuzz(server, kept, given.verbose)
    print(f"{len(faults)} faults", *faults, sep="\n  ")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
