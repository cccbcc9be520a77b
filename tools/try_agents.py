"""Runs every coding agent that is on the PATH against a server for some turns, and prints a table.

    python tools/try_agents.py [--only claude --only codex] [--turns 8] [--url URL]

Installs nothing. Without --url it writes a model of random weights (`make_random_hybrid.py --shape
agents`), serves it and asks that. Each agent has a temporary home and its default settings, and runs
without a network but for loopback (`unshare -n`), where that is permitted and the server is its own.
In every other turn, from the first, the user asks for a shell command, which changes a file of a git
repository; the agent runs it and returns the result.

The agents are unmodified. What makes random weights reply sensibly is a proxy before the server: it
forces one call of the shell tool with a fixed command where the user asked for it, and one fixed
text everywhere else (`tools/agents/forcing.py`). --as-sent turns the proxy's changes off, for a
server with a model that can be asked. Exits with 1 if anything failed.

More than two turns, or --tokens, print each request's tokens: those of its prompt, those cached,
those computed, those that are new, and those computed again (`tools/agents/token_table.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from agents.agent_clients import AGENTS, AgentClient, Place
from agents.forcing import DONE, MARK, RESULT, force
from agents.forcing_proxy import Exchange, ForcingProxy
from agents.token_table import token_table
from tokenizers import Tokenizer

ISOLATED = "PIPPIN_TRY_AGENTS_ISOLATED"  # set in the process that has a network namespace
TURN_SECONDS = 300
SERVER_SECONDS = 300
MODEL, LOG = "random-agents", "server.log"


@dataclass(frozen=True)
class Trial:
    """What came of one agent."""

    agent: AgentClient
    version: str
    exchanges: list[Exchange]
    faults: list[str]

    @property
    def called(self) -> bool:
        """Whether a tool's result was sent back."""
        return any(_has_result(exchange.sent) for exchange in self.exchanges)

    def row(self) -> str:
        call = ("yes" if self.called else "no") if self.agent.has_tools else "none"
        came = "ok" if not self.faults else "; ".join(self.faults)
        number = len(self.exchanges)
        return f"{self.agent.name:12} {self.version:10} {number:8} {call:5} {came}"


def _has_result(sent: dict[str, Any]) -> bool:
    items = sent.get("messages") or sent.get("input")
    text = json.dumps(items)
    is_result = '"role": "tool"' in text or "tool_result" in text or "call_output" in text
    return is_result and (RESULT in text or "llm_version" in text)


def try_agent(
    agent: AgentClient, proxy: ForcingProxy, served: dict[str, Any], given: argparse.Namespace
) -> Trial:
    version, faults, start = _version(agent), [], len(proxy.exchanges)
    with tempfile.TemporaryDirectory(prefix=f"try-{agent.command}-") as folder:
        place = Place(Path(folder), proxy.url, served["id"], served["max_model_len"])
        more = dict(pair.split("=", 1) for pair in given.env)
        environment = place.environment() | agent.start(place) | more
        subprocess.run(["git", "init", "--quiet", str(place.home / "work")], check=True)
        texts = [
            f"Turn {turn + 1}: {'say that it is done' if turn % 2 else MARK}, please."
            for turn in range(given.turns)
        ]
        if given.one_process and agent.one_process:
            faults += _ask_one_process(agent, place, environment, texts)
            texts = []
        for turn, text in enumerate(texts):
            fault = _ask(agent, place, environment, text, again=turn > 0)
            if fault is not None:
                faults.append(f"turn {turn + 1}: {fault}")
                break
    exchanges = proxy.exchanges[start:]
    refused = [e for e in exchanges if e.status != 200]
    faults += [f"HTTP {e.status} from {e.path}: {e.error[:200]}" for e in refused[:2]]
    trial = Trial(agent, version, exchanges, faults)
    if agent.has_tools and not trial.called and not faults:
        faults.append("no result of the tool was sent back")
    return trial


def _ask(
    agent: AgentClient, place: Place, environment: dict[str, str], text: str, *, again: bool
) -> str | None:
    """One turn; what was wrong with it."""
    command = [agent.command, *agent.ask(place, text, again)]
    try:
        done = subprocess.run(
            command,
            cwd=place.home / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end after {TURN_SECONDS} seconds"
    if done.returncode != 0:
        return f"exit status {done.returncode}: {(done.stderr or done.stdout)[-300:].strip()}"
    return None if DONE in done.stdout else f"printed {done.stdout[-200:].strip()!r}"


def _ask_one_process(
    agent: AgentClient, place: Place, environment: dict[str, str], texts: list[str]
) -> list[str]:
    """All turns, as in a session at the terminal; what was wrong with them."""
    command = [agent.command, *agent.one_process]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    work = place.home / "work"
    with subprocess.Popen(command, cwd=work, env=environment, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for turn, text in enumerate(texts, 1):
            message = {"role": "user", "content": text}
            process.stdin.write(json.dumps({"type": "user", "message": message}) + "\n")
            process.stdin.flush()
            lines = map(json.loads, process.stdout)
            result = next((line for line in lines if line.get("type") == "result"), None)
            if result is None or DONE not in str(result.get("result")):
                process.kill()
                return [f"turn {turn}: the result is {result}"[:300]]
    return []


def _version(agent: AgentClient) -> str:
    done = subprocess.run([agent.command, "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+[\w.]*", done.stdout)
    return found[0] if found else "?"


def print_tokens(trial: Trial, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / MODEL / "tokenizer.json"))
    log = (folder / LOG).read_text()
    table = token_table(trial.exchanges, log, lambda text: len(tokenizer.encode(text)))
    print("\n".join(table), flush=True)


@contextlib.contextmanager
def own_server(folder: Path, options: list[str]) -> Iterator[str]:
    """A server of random weights, with its files in `folder`: its address."""
    model, log = folder / MODEL, folder / LOG
    tool = ROOT / "tools" / "make_random_hybrid.py"
    subprocess.run([sys.executable, tool, model, "--shape", "agents"], check=True)
    port = _free_port()
    command = [sys.executable, "-m", "pippin", "serve", "--model", str(model)]
    command += ["--port", str(port), "--memory", "2GB", "--log-format", "json", *options]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_ready(url, server)
            yield url
        finally:
            server.terminate()


def _wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready"):
            return
        time.sleep(0.5)
    raise SystemExit(f"the server was not ready after {SERVER_SECONDS} seconds, or has exited")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def isolate() -> str:
    """Starts this program again in a network of loopback only; says why not, where it cannot."""
    if ISOLATED in os.environ:
        _raise_loopback()
        return "isolated: loopback only"
    unshare = shutil.which("unshare")
    if unshare is None:
        return "not isolated: there is no unshare"
    command = [unshare, *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        return "not isolated: unshare --net is not permitted"
    os.environ[ISOLATED] = "1"
    sys.stdout.flush()
    os.execv(unshare, [*command, sys.executable, *sys.argv])


def _raise_loopback() -> None:
    get_flags, set_flags, up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("H", request, 16)
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--url", help="a running server, instead of one of random weights")
    options.add_argument("--only", action="append", help="a command, such as claude; repeatable")
    options.add_argument("--turns", type=int, default=2)
    options.add_argument(
        "--one-process", action="store_true", help="all turns of Claude Code in one process"
    )
    options.add_argument("--env", action="append", default=[], help="NAME=VALUE for the agents")
    options.add_argument("--tokens", action="store_true", help="print the tokens of each request")
    options.add_argument("--record", type=Path, help="folder for the bodies that agents sent")
    options.add_argument("--as-sent", action="store_true", help="force nothing")
    options.add_argument("--serve", action="append", default=[], help="an option for the server")
    given = options.parse_args()
    network = "not isolated: the server is not this program's" if given.url else isolate()
    print(network, flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="try-agents-")))
        url = given.url and given.url.rstrip("/").removesuffix("/v1")
        if url is None:
            url = stack.enter_context(own_server(folder, given.serve))
        change = (lambda _, body: dict(body)) if given.as_sent else force
        proxy = stack.enter_context(ForcingProxy(url, change))
        return run(proxy, given, folder)


def run(proxy: ForcingProxy, given: argparse.Namespace, folder: Path) -> int:
    with urllib.request.urlopen(f"{proxy.url}/v1/models") as reply:
        served = json.load(reply)["data"][0]
    print(f"{'agent':12} {'version':10} {'requests':>8} {'call':5} result")
    failed = False
    for agent in AGENTS:
        if given.only and agent.command not in given.only:
            continue
        if shutil.which(agent.command) is None:
            print(f"{agent.name:12} absent")
            continue
        try:
            trial = try_agent(agent, proxy, served, given)
        except OSError as error:  # such as one for another processor
            print(f"{agent.name:12} cannot be run: {error}", flush=True)
            failed = True
            continue
        failed |= bool(trial.faults)
        print(trial.row(), flush=True)
        if given.url is None and (given.tokens or given.turns > 2):
            print_tokens(trial, folder)
        if given.record is not None:
            record(trial, given.record)
    return int(failed)


def record(trial: Trial, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, exchange in enumerate(trial.exchanges, 1):
        path = folder / f"{trial.agent.command}-{number:02}.json"
        path.write_text(json.dumps(exchange.sent, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
