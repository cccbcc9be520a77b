"""Hand-over between two machines, as far as one Linux machine shows it: a network that is slow, loses, and is cut.

    sudo unshare --net python tools/handover_network.py
    unshare --map-root-user --net python tools/handover_network.py        the same for other users

The prefill engine's server has a network namespace of its own; the decode engine's is in that of this process. Between
both is a wire whose other end is this process: it delays packets, drops some of them, or all. They use TLS with a secret
and a certificate, made with the commands of docs/operations/handover.md. Prompts are asked for over wires of different
speed and while the wire is cut; then decode engines with another secret, certificate, name or model try to connect.
Prints how many tokens were handed over and what a client waited for the first token. Exit status 1 if a reply differs
from that of one server alone or is an error, if a wire that works hands nothing over, or if a stranger is connected.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import itertools
import json
import os
import random
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import pippin

BUNDLED = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
PREFILL, DECODE, OTHER, PORT = "192.0.2.1", "192.0.2.2", "192.0.2.3", 7000  # for documentation
NAME = "prefill.lan"
OPTIONS = ("--backend=mlx", "--memory=1GB", "--port=0", "--config", os.devnull)
DTYPE = "float32"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU, QUEUE_BYTES = 1500, 1 << 20
REPLY_TOKENS = 16
PATIENCE_SECONDS = 120.0
SECRET = ["openssl", "rand", "-hex", "32"]
CERTIFICATE = [
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", "2", "-subj", f"/CN={NAME}"),
]


class Cable:
    """Two network devices, and what happens to packets between them."""

    def __init__(self) -> None:
        self.delay, self.loss, self.bytes_per_second, self.is_cut = 0.0, 0.0, 1e12, False
        self.num_bytes = 0  # that have arrived at the decode engine's end
        ends = [open_device(name) for name in ("pippin-prefill", "pippin-decode")]
        self._free_at = [0.0, 0.0]  # of each direction
        self._packets: list[tuple[float, int, int, bytes]] = []  # by when they arrive
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._rng = random.Random(1)
        for number, end in enumerate(ends):
            threading.Thread(target=self._read, args=(number, end), daemon=True).start()
        threading.Thread(target=self._write, args=(ends,), daemon=True).start()

    def set(self, *, delay: float = 0.0005, loss: float = 0.0, mbit: float = 1000.0) -> None:
        self.delay, self.loss, self.bytes_per_second = delay, loss, mbit * 1e6 / 8

    def _read(self, number: int, end: int) -> None:
        while True:
            try:
                packet = os.read(end, MTU + 100)
            except OSError:  # it is gone with its namespace
                return
            now = time.monotonic()
            free_at = max(now, self._free_at[number])
            is_full = (free_at - now) * self.bytes_per_second > QUEUE_BYTES
            if self.is_cut or is_full or self._rng.random() < self.loss:
                continue
            self._free_at[number] = free_at = free_at + len(packet) / self.bytes_per_second
            with self._changed:
                heapq.heappush(self._packets, (free_at + self.delay, next(self._numbers), number, packet))
                self._changed.notify()

    def _write(self, ends: Sequence[int]) -> None:
        while True:
            with self._changed:
                while not self._packets or self._packets[0][0] > time.monotonic():
                    wait = self._packets[0][0] - time.monotonic() if self._packets else None
                    self._changed.wait(wait)
                _, _, number, packet = heapq.heappop(self._packets)
            if not self.is_cut:
                with suppress(OSError):  # the other end may be gone with its namespace
                    os.write(ends[1 - number], packet)
                    self.num_bytes += len(packet) * (1 - number)


def open_device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def two_machines() -> Iterator[tuple[Cable, list[str]]]:
    """The cable, and what runs a command on the other one."""
    if os.geteuid() or len(run("ip", "-oneline", "link").splitlines()) > 1:
        raise SystemExit("start it with `sudo unshare --net` or `unshare --map-root-user --net` before the command")
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as holder:
        try:
            there = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
            here = os.readlink("/proc/self/ns/net")
            wait_until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != here, "no second namespace")
            cable = Cable()
            run("ip", "link", "set", "pippin-prefill", "netns", str(holder.pid))
            for prefix, device, near, far in (
                (there, "pippin-prefill", PREFILL, DECODE),
                ([], "pippin-decode", DECODE, PREFILL),
            ):
                run(*prefix, "ip", "link", "set", "lo", "up")
                run(*prefix, "ip", "address", "add", near, "peer", far, "dev", device)
                run(*prefix, "ip", "link", "set", device, "mtu", str(MTU), "up")
            run(*there, "ip", "address", "add", OTHER, "dev", "pippin-prefill")
            run("ip", "route", "add", OTHER, "dev", "pippin-decode")
            yield cable, there
        finally:
            holder.terminate()


def wait_until(condition: Callable[[], object], message: str) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE_SECONDS:
            raise SystemExit(f"{message} after {PATIENCE_SECONDS:.0f} seconds")
        time.sleep(0.02)
    return time.monotonic() - began


@dataclass
class Server:
    url: str
    log: Path

    def status(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/status", timeout=30).raise_for_status().json())

    @property
    def link(self) -> dict[str, Any]:
        return dict(self.status()["peer"]["peers"][0])

    def wait_for_link(self) -> float:
        return wait_until(lambda: self.link["connected"], "not connected")


@contextmanager
def serve(
    model: Path, log: Path, *options: str, prefix: Sequence[str] = (), dtype: str = DTYPE
) -> Iterator[Server]:
    """It is ready, unless it is on the other machine, where this process cannot ask it."""
    command = [*prefix, sys.executable, "-m", "pippin", "serve", str(model), *OPTIONS, f"--dtype={dtype}", *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise SystemExit(f"no server: {log.read_text()}")
            server = Server(found[0], log)
            if not prefix:
                ready = lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200  # noqa: E731
                wait_until(ready, "no engine")
            yield server
        finally:
            process.terminate()
            process.wait(60)


@dataclass
class Reply:
    first: float = 0.0  # seconds to its first token
    text: str = ""
    handed_over: int = 0
    error: str | None = None


def ask(server: Server, prompt: list[int]) -> Reply:
    body = {"model": BUNDLED.name, "prompt": prompt, "max_tokens": REPLY_TOKENS, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}}
    reply, began = Reply(), time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS) as answer:
        if answer.status_code != 200:
            reply.error = answer.read().decode()
            return reply
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                reply.error = str(event["error"]["message"])
                return reply
            for choice in event["choices"]:
                reply.first = reply.first or time.monotonic() - began
                reply.text += choice["text"]
            if event.get("usage"):
                reply.handed_over = event["usage"]["prompt_tokens_details"].get("peer_cached_tokens", 0)
    return reply


@dataclass
class Machines:
    """What is measured, and what went wrong."""

    cable: Cable
    decode: Server
    num_tokens: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    replies: list[tuple[list[int], Reply]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def ask(self) -> Reply:
        prompt = [self.rng.randrange(3, 8_000) for _ in range(self.num_tokens)]
        reply = ask(self.decode, prompt)
        self.replies.append((prompt, reply))
        return reply

    def show(self, name: str, count: int = 6, *, most_lost: int = 0) -> None:
        """Prompts one after the other. `most_lost`: that may be computed by the decode engine."""
        replies = [self.ask() for _ in range(count)]
        whole = sum(reply.handed_over == self.num_tokens for reply in replies)
        if whole < count - most_lost:
            self.broken.append(f"{name}: {count - whole} prompts did not arrive: {self.decode.link}")
        firsts = [reply.first for reply in replies]
        print(
            f"{name}: {whole} of {count} prompts handed over, first token after {statistics.median(firsts):.2f} s, "
            f"at most {max(firsts):.2f}",
            flush=True,
        )

    def cut(self, seconds: float) -> None:
        """In the middle of a transfer; prompts are asked for all the time."""
        before = self.cable.num_bytes
        replies: list[Reply] = []
        is_over = threading.Event()

        def client() -> None:
            while not is_over.is_set():
                replies.append(self.ask())

        thread = threading.Thread(target=client)
        thread.start()
        wait_until(lambda: self.cable.num_bytes - before > 300_000, "nothing is sent")
        self.cable.is_cut, began = True, time.monotonic()
        noticed = None
        while (now := time.monotonic()) - began < seconds:
            if noticed is None and not self.decode.link["connected"]:
                noticed = now - began
            time.sleep(0.05)
        self.cable.is_cut, num_cut = False, len(replies) + 1  # with the one that runs
        waited = self.decode.wait_for_link()
        num_before = len(replies)
        handed = wait_until(
            lambda: any(reply.handed_over == self.num_tokens for reply in replies[num_before:]),
            "nothing is handed over again",
        )
        is_over.set()
        thread.join()
        firsts = [reply.first for reply in replies[:num_cut]]
        what = "not noticed" if noticed is None else f"noticed after {noticed:.1f} s"
        print(
            f"cut for {seconds:g} s: {what}, connected {waited:.1f} s after it was back, prompts handed over "
            f"{waited + handed:.1f} s after; {num_cut} prompts meanwhile, first tokens after "
            f"{statistics.median(firsts):.2f} s, at most {max(firsts):.2f}",
            flush=True,
        )

    def check(self, alone: Server) -> None:
        wrong = sum(
            reply.error is not None or ask(alone, prompt).text != reply.text for prompt, reply in self.replies
        )
        self.broken += [f"error: {reply.error}" for _, reply in self.replies if reply.error is not None]
        if wrong:
            self.broken.append(f"{wrong} replies are not what one server computes")
        print(f"{len(self.replies)} replies, {wrong} of them not what one server computes")


def make_keys(folder: Path, name: str) -> dict[str, str]:
    """A secret and a certificate, by the options that name them."""
    paths = {part: str(folder / f"{name}.{part}") for part in ("secret", "key", "pem")}
    Path(paths["secret"]).write_text(run(*SECRET))
    names = f"subjectAltName=DNS:{NAME},IP:{PREFILL}"
    run(*CERTIFICATE, "-keyout", paths["key"], "-out", paths["pem"], "-addext", names)
    return paths


def strangers(folder: Path, keys: dict[str, str], broken: list[str]) -> None:
    """Decode engines that do not fit."""
    other = make_keys(folder, "other")
    changed = folder / BUNDLED.name
    shutil.copytree(BUNDLED, changed)
    weights = changed / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    address = f"tls://{PREFILL}:{PORT}"
    cases = {
        "another secret": (BUNDLED, address, other["secret"], keys["pem"], DTYPE),
        "another certificate": (BUNDLED, address, keys["secret"], other["pem"], DTYPE),
        "another address": (BUNDLED, f"tls://{OTHER}:{PORT}", keys["secret"], keys["pem"], DTYPE),
        "another model": (changed, address, keys["secret"], keys["pem"], DTYPE),
        "another dtype": (BUNDLED, address, keys["secret"], keys["pem"], "bfloat16"),
    }
    for name, (model, peer, secret, certificates, dtype) in cases.items():
        options = ["--role=decode", f"--peer={peer}", f"--peer-secret-file={secret}", f"--peer-ca={certificates}"]
        with serve(model, folder / "stranger", *options, dtype=dtype) as server:
            wait_until(lambda server=server: server.link["error"] or server.link["connected"], "no result")
            link = server.link
            reply = ask(server, list(range(3, 803)))
            print(f"{name}: {link['error']}", flush=True)
            if link["connected"] or reply.error or reply.handed_over:
                broken.append(f"{name}: {link}, {reply}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2_000, help="of each prompt")
    parser.add_argument("--cut", type=float, nargs="*", default=[2.0, 30.0], help="seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pippin-network-") as name, two_machines() as (cable, there):
        folder = Path(name)
        keys = make_keys(folder, "peer")
        secret = f"--peer-secret-file={keys['secret']}"
        listen = ["--role=prefill", f"--peer-listen=tls://0.0.0.0:{PORT}", secret]
        listen += [f"--peer-cert={keys['pem']}", f"--peer-key={keys['key']}"]
        receive = ["--role=decode", f"--peer=tls://{PREFILL}:{PORT}", secret, f"--peer-ca={keys['pem']}"]
        cable.set()
        with serve(BUNDLED, folder / "prefill", *listen, prefix=there) as prefill:
            with serve(BUNDLED, folder / "decode", *receive) as decode:
                machines = Machines(cable, decode, args.tokens)
                decode.wait_for_link()
                machines.ask()  # it warms up
                machines.show("1 Gbit/s, 1 ms there and back")
                cable.set(delay=0.01, mbit=100)
                machines.show("100 Mbit/s, 20 ms")
                cable.set(delay=0.01, mbit=100, loss=0.01)
                machines.show("100 Mbit/s, 20 ms, 1% of the packets lost", most_lost=6)
                cable.set(delay=0.1, mbit=10)
                machines.show("10 Mbit/s, 200 ms", most_lost=6)
                cable.set(delay=0.005, mbit=100)
                for seconds in args.cut:
                    machines.cut(seconds)
                if "ERROR" in (log := decode.log.read_text() + prefill.log.read_text()):
                    machines.broken.append(log)
            cable.set()
            strangers(folder, keys, machines.broken)
        with serve(BUNDLED, folder / "alone") as alone:
            machines.check(alone)
    for text in machines.broken:
        print(f"broken: {text}")
    return 1 if machines.broken else 0


if __name__ == "__main__":
    sys.exit(main())
