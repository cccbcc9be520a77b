"""Kills prefill engines, decode engines and the connection between them, under load.

    python tools/handover_kills.py [--kills 300] [--backend mlx] [-- OPTIONS of both, such as --speculate suffix]

Two servers with the bundled model, a proxy between them, and clients whose prompts are all new.
Every request has to end once: with the tokens that one server alone computes, or, if its engine was
killed, with an error that says so. At the end nothing may be left of any on either side. Stops with
status 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from bundled import BUNDLED_PATH  # noqa: E402
from processes import children_of, environment, wait_until  # noqa: E402

NUM_CLIENTS = 4
PAUSE_SECONDS = (0.2, 2.5)  # between two kills
OPTIONS = ("--memory", "1GB", "--max-running", "8")


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def status(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/status", timeout=30)
        return dict(answer.json()) if answer.status_code == 200 else {}

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        return False

    def kill_engine(self) -> bool:
        """Whether there was one."""
        for pid in children_of(self.process.pid)[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False


@contextmanager
def serve(backend: str, log: Path, *options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "pippin", "serve", str(BUNDLED_PATH), "--backend", backend]
    command += [
        "--dtype",
        "float32",
        "--port",
        "0",
        "--engine-restarts",
        "1000",
        *OPTIONS,
        *options,
    ]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, log.read_text()
            server = Server(process, found[0])
            wait_until(server.is_ready)
            yield server
        finally:
            process.terminate()
            process.wait(60)


class Proxy:
    """Between a decode engine and a prefill engine; cuts what passes through it."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        self._close(one, other)

    def cut(self) -> bool:
        sockets, self._sockets = self._sockets, []
        self._close(*sockets)
        return bool(sockets)

    def _close(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@dataclass
class Results:
    replies: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


def make_request(rng: random.Random) -> dict[str, Any]:
    length = rng.choice((280, 400, 700))
    body: dict[str, Any] = {
        "model": BUNDLED_PATH.name,
        "prompt": [rng.randrange(3, 90) for _ in range(length)],
        "max_tokens": rng.choice((1, 4, 24)),
        "ignore_eos": True,
        "temperature": rng.choice((0.0, 1.0)),
        "seed": rng.randrange(1 << 30),
    }
    return body


def ask(url: str, body: dict[str, Any]) -> tuple[str | None, str | None]:
    """The text, or the error. AssertionError: the stream ended twice, or without an end."""
    text, error, ends = "", None, 0
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=300
    ) as answer:
        if answer.status_code != 200:
            return None, f"{answer.status_code}: {json.loads(answer.read())['error']['message']}"
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ends += 1
            elif "error" in (event := json.loads(line[6:])):
                error = str(event["error"]["message"])
            else:
                text += event["choices"][0]["text"]
    assert error is not None or ends == 1, f"a stream ended {ends} times"
    return (None, error) if error is not None else (text, None)


def run_client(url: str, seed: int, results: Results, is_over: threading.Event) -> None:
    rng = random.Random(seed)
    while not is_over.is_set():
        body = make_request(rng)
        text, error = ask(url, body)
        with results.lock:
            if error is not None:
                results.errors[re.sub(r"\d+", "N", error)] += 1
            else:
                assert text is not None
                results.replies.append((body, text))
        if error is not None:
            time.sleep(0.2)


def kill(
    rng: random.Random, num_kills: int, prefill: Server, decode: Server, proxy: Proxy
) -> Counter[str]:
    kinds = {
        "prefill engine": prefill.kill_engine,
        "decode engine": decode.kill_engine,
        "connection": proxy.cut,
    }
    killed: Counter[str] = Counter()
    while sum(killed.values()) < num_kills:
        time.sleep(rng.uniform(*PAUSE_SECONDS))
        kind = rng.choice(list(kinds))
        if not decode.is_ready() or (kind == "prefill engine" and not prefill.is_ready()):
            continue  # it would only ever load
        killed[kind] += kinds[kind]()
        if sum(killed.values()) % 20 == 0:
            print(f"  {dict(killed)}", flush=True)
    return killed


def left_over(server: Server) -> list[str]:
    """What a server without requests still has of some."""
    status = server.status()
    counts = {name: status.get(name, 0) for name in ("running", "waiting")}
    counts["claimed bytes"] = status["memory"]["claimed_bytes"] if status else 0
    if peer := status.get("peer"):
        counts["bytes from peers"] = peer["store"]["bytes"]
    return [f"{name}: {count}" for name, count in counts.items() if count]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--backend", default="mlx")
    parser.add_argument("--seed", type=int, default=1)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    more = sys.argv[at + 1 :]
    folder = Path(tempfile.mkdtemp(prefix="pippin-kills-"))
    port = free_port()
    proxy = Proxy(port)
    listen, peer = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{proxy.port}"
    results, is_over, broken = Results(), threading.Event(), []

    def run(seed: int) -> None:
        try:
            run_client(decode.url, seed, results, is_over)
        except Exception as error:
            broken.append(repr(error))

    with (
        serve(
            args.backend, folder / "prefill", "--role", "prefill", "--peer-listen", listen, *more
        ) as prefill,
        serve(args.backend, folder / "decode", "--role", "decode", "--peer", peer, *more) as decode,
    ):
        clients = [
            threading.Thread(target=run, args=(args.seed * 1000 + number,))
            for number in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        killed = kill(random.Random(args.seed), args.kills, prefill, decode, proxy)
        is_over.set()
        for client in clients:
            client.join()
        wait_until(decode.is_ready)
        wait_until(prefill.is_ready)
        with suppress(AssertionError):
            wait_until(lambda: not left_over(prefill) and not left_over(decode))
        broken += [f"prefill: {text}" for text in left_over(prefill)] + [
            f"decode: {text}" for text in left_over(decode)
        ]
        handovers = decode.status().get("peer", {}).get("handovers")
        print(
            f"killed {dict(killed)}; {len(results.replies)} replies, errors {dict(results.errors)}"
        )
        print(f"of the last decode engine: {handovers}")
    with serve(args.backend, folder / "alone") as alone, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        asked = pool.map(lambda reply: ask(alone.url, reply[0]), results.replies)
        wrong = sum(
            said != (text, None) for said, (_, text) in zip(asked, results.replies, strict=True)
        )
    print(f"{wrong} of {len(results.replies)} replies are not what one server computes")
    old = time.time() - 300  # seconds: later ones are removed by the next engine that starts
    left = [path for path in Path("/dev/shm").glob("pippin-*") if path.stat().st_mtime < old]
    broken += [f"{path} was left behind" for path in left]
    for text in broken:
        print(f"broken: {text}")
    return 1 if wrong or broken else 0


if __name__ == "__main__":
    sys.exit(main())
