"""How much of one cache's hit rate two replicas reach behind routers that others wrote.

    python tools/try_routers.py                      one server, round-robin, sglang-router, Ray Serve
    python tools/try_routers.py "ray serve" --clients 8

Conversations and branches of shared documents, in a random order that is the same each time, on the bundled model.
Prints the share of prompt tokens that were cached, and how many requests each replica had. Exit status 1 if a router
reaches less than 90% of one cache. Needs `pip install sglang-router` and `pip install 'pippin[ray]'`; what is not
installed is left out by name. Ray looks for an address outside: `unshare -n` and `ip link set lo up` keep it in.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import httpx

import pippin
from pippin.bench.prompts import Prompts, count_with
from pippin.bench.servers.processes import ended_by_sigterm, free_port, pippin_server

MODEL = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
MEMORY = "2GB"  # of each replica: nothing is evicted
BAR = 0.9
CONVERSATIONS, TURNS, SYSTEM_TOKENS, REPLY_TOKENS = 12, 5, 300, 24
DOCUMENTS, BRANCHES, DOCUMENT_TOKENS = 8, 6, 500
START_SECONDS = 300
BIN = Path(sys.executable).parent


@dataclass
class Conversation:
    """Turns in order; a document's branches are conversations of one turn."""

    system: str
    questions: list[str]
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self) -> list[dict[str, str]]:
        if not self.messages:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": self.questions.pop(0)})
        return self.messages


def workload() -> list[list[Conversation]]:
    """Rounds of conversations that are asked one turn each; one may be in several rounds."""
    prompts = Prompts("routers", count_with(MODEL))
    turns: list[Conversation] = []
    for _ in range(CONVERSATIONS):
        talk = Conversation(prompts.text(SYSTEM_TOKENS), [prompts.question() for _ in range(TURNS)])
        turns += [talk] * TURNS
    for _ in range(DOCUMENTS):
        document = prompts.text(DOCUMENT_TOKENS)
        turns += [Conversation(document, [prompts.question()]) for _ in range(BRANCHES)]
    random.Random("order").shuffle(turns)
    return [[turn] for turn in turns]


def together(turns: list[list[Conversation]], num_clients: int) -> list[list[Conversation]]:
    """Rounds of up to `num_clients` different conversations."""
    rounds: list[list[Conversation]] = []
    for (turn,) in turns:
        if not rounds or len(rounds[-1]) == num_clients or turn in rounds[-1]:
            rounds.append([])
        rounds[-1].append(turn)
    return rounds


@dataclass
class Result:
    prompt: int = 0
    cached: int = 0
    replicas: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return self.cached / self.prompt


async def measure(urls: Sequence[str], num_clients: int) -> Result:
    """Requests go to the URLs in turn."""
    result = Result()
    targets = itertools.cycle(urls)

    async def one(client: httpx.AsyncClient, talk: Conversation, url: str) -> None:
        body = {"model": "*", "messages": talk.ask(), "max_tokens": REPLY_TOKENS, "temperature": 0}
        answer = await client.post(f"{url}/v1/chat/completions", json=body)
        answer.raise_for_status()
        reply = answer.json()
        talk.messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
        result.prompt += reply["usage"]["prompt_tokens"]
        result.cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        result.replicas[answer.headers.get("x-pippin-replica", url)] += 1

    async with httpx.AsyncClient(timeout=300) as client:
        for talks in together(workload(), num_clients):
            await asyncio.gather(*(one(client, talk, next(targets)) for talk in talks))
    return result


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        options = ["--memory", MEMORY, "--alias", "*"]
        yield [stack.enter_context(pippin_server(str(MODEL), options)).url for _ in range(count)]


@contextlib.contextmanager
def child(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with ended_by_sigterm(), log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | environment
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"{url} is not ready; {log}:\n{log.read_text(errors='replace')[-2000:]}")


def one_server(num_clients: int, folder: Path) -> Result:
    with servers(1) as urls:
        return asyncio.run(measure(urls, num_clients))


def round_robin(num_clients: int, folder: Path) -> Result:
    with servers(2) as urls:
        return asyncio.run(measure(urls, num_clients))


def sglang_router(num_clients: int, folder: Path) -> Result:
    """With the options of deploy/compose.yaml."""
    port, log = free_port(), folder / "sglang-router.log"
    url = f"http://127.0.0.1:{port}"
    with servers(2) as urls:
        options = ["--policy=cache_aware", "--health-check-endpoint=/ready", "--log-level=warn"]
        options += [f"--prometheus-port={free_port()}"]
        command = [str(BIN / "sglang-router"), "launch", "--host=127.0.0.1", f"--port={port}"]
        with child([*command, *options, "--worker-urls", *urls], log) as process:
            wait_for(f"{url}/readiness", process, log)
            result = asyncio.run(measure([url], num_clients))
            result.replicas = Counter({server: requests_of(server) for server in urls})
            return result


def requests_of(url: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("pippin_requests_total"))


def ray_serve(num_clients: int, folder: Path) -> Result:
    """A cluster of this machine alone, and `pippin deploy ray` on it."""
    port, cluster, log = free_port(), free_port(), folder / "ray.log"
    url = f"http://127.0.0.1:{port}"
    config = folder / "deployment.toml"
    config.write_text(
        f'model = "{MODEL}"\nport = {port}\nmemory = "{MEMORY}"\nalias = ["*"]\n'
        "[ray]\nmin-replicas = 2\nmax-replicas = 2\n"
    )
    start = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=2", f"--port={cluster}"]
    start += ["--node-ip-address=127.0.0.1", "--object-store-memory=200000000", "--include-dashboard=false"]
    start += [f"--temp-dir={folder}", "--disable-usage-stats"]
    with child(start, log, RAY_USAGE_STATS_ENABLED="0") as process:
        deploy = [sys.executable, "-m", "pippin", "deploy", "ray", str(config)]
        deadline = time.monotonic() + START_SECONDS
        while True:
            done = subprocess.run([*deploy, "--address", f"127.0.0.1:{cluster}"], capture_output=True, text=True)
            if done.returncode == 0:
                break
            if time.monotonic() > deadline or process.poll() is not None or "no Ray cluster" not in done.stderr:
                raise SystemExit(f"pippin deploy ray: {done.stderr[-3000:]}")
            time.sleep(1)
        return asyncio.run(measure([url], num_clients))


WAYS: dict[str, tuple[str | None, Callable[[int, Path], Result]]] = {
    "one server": (None, one_server),
    "round-robin": (None, round_robin),
    "sglang-router": ("sglang_router", sglang_router),
    "ray serve": ("ray", ray_serve),
}
ROUTERS = ("sglang-router", "ray serve")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ways", nargs="*", help=f"of {', '.join(WAYS)}; all if none is named")
    parser.add_argument("--clients", type=int, default=4, help="requests at the same time")
    parser.add_argument("--json", action="store_true", help="print lines of JSON")
    given = parser.parse_args()
    if unknown := [way for way in given.ways if way not in WAYS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(WAYS)}")
    best, failed = None, False
    folder = Path(tempfile.mkdtemp(prefix="routers-", dir="/tmp"))
    try:
        for way, (module, run) in WAYS.items():
            if given.ways and way not in given.ways and way != "one server":
                continue
            if module is not None and find_spec(module) is None:
                print(f"{way}: {module} is not installed")
                continue
            result = run(given.clients, folder)
            best = best or result
            share = result.rate / best.rate
            failed |= way in ROUTERS and share < BAR
            counts = sorted(result.replicas.values(), reverse=True)
            if given.json:
                fields = {"prompt": result.prompt, "cached": result.cached, "share": share, "replicas": counts}
                print(json.dumps({"way": way, **fields}))
            else:
                numbers = f"{result.cached:,} of {result.prompt:,} tokens cached ({result.rate:.1%})"
                print(f"{way:14} {numbers}, {share:.1%} of one cache; requests by replica {counts}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
