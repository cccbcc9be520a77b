"""Ray Serve adds a replica under load and removes it again: streams that run meanwhile, and where prompts are sent.

    python tools/ray_scaling.py

Starts a Ray cluster on this machine and deploys the bundled model with one to two replicas, as `pippin deploy ray`
does, but with Ray's delays of seconds in place of minutes. Conversations stream: one client, then many until both
replicas serve, then one until a single replica is left. Prints for each time the replicas, the replies, the longest wait for
a first token, and the share of prompt tokens of later turns that were cached. Exit status 1 if a stream was cut or
was an error, or if no replica was added or removed. Needs `pip install 'pippin[ray]'`. Ray looks for an address
outside: `unshare -n` and `ip link set lo up` keep it in.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from try_routers import BIN, MODEL, child

from pippin.bench.prompts import Prompts, count_with
from pippin.bench.servers.processes import free_port

CLIENTS, TARGET_REQUESTS = 10, 3.0
TURNS, REPLY_TOKENS = 4, 96
SYSTEM_TOKENS = 300
START_SECONDS, SCALE_SECONDS, STEADY_SECONDS = 300.0, 150.0, 20.0
DELAYS = {"upscale_delay_s": 3.0, "downscale_delay_s": 10.0, "metrics_interval_s": 2.0, "look_back_period_s": 6.0}


@dataclass
class Phase:
    name: str
    replies: Counter[str] = field(default_factory=Counter)  # by replica
    later_tokens: int = 0  # of prompts behind a conversation's first
    cached: int = 0
    slowest: float = 0.0
    broken: list[str] = field(default_factory=list)

    def show(self, num_replicas: int) -> None:
        share = self.cached / max(self.later_tokens, 1)
        counts = sorted(self.replies.values(), reverse=True)
        print(
            f"{self.name}: {num_replicas} replicas, {sum(counts)} replies {counts}, {len(self.broken)} cut or errors; "
            f"longest wait for a first token {self.slowest:.1f} s; {share:.1%} of later turns' tokens cached",
            flush=True,
        )


class Clients:
    """Conversations that run until `stop`, as many at a time as `count` says."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._prompts = Prompts("scaling", count_with(MODEL))
        self._stops: list[threading.Event] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.phases: list[Phase] = []

    def begin(self, name: str, count: int) -> Phase:
        self.phases.append(Phase(name))
        for stop in self._stops[count:]:
            stop.set()
        del self._stops[count:]
        while len(self._stops) < count:
            self._stops.append(threading.Event())
            self._threads.append(threading.Thread(target=self._run, args=(self._stops[-1],)))
            self._threads[-1].start()
        return self.phases[-1]

    def end(self) -> None:
        for stop in self._stops:
            stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with self._lock:
                system = self._prompts.text(SYSTEM_TOKENS)
                questions = [self._prompts.question() for _ in range(TURNS)]
            messages = [{"role": "system", "content": system}]
            for turn, question in enumerate(questions):
                messages.append({"role": "user", "content": question})
                try:
                    text = self._ask(messages, is_first=turn == 0)
                except Exception as error:
                    self.phases[-1].broken.append(repr(error))
                    return
                messages.append({"role": "assistant", "content": text})

    def _ask(self, messages: list[dict[str, str]], *, is_first: bool) -> str:
        body = {"model": "*", "messages": messages, "max_tokens": REPLY_TOKENS, "temperature": 0, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        text, usage, has_end, began, first = "", dict[str, Any](), False, time.monotonic(), 0.0
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=300) as answer:
            if answer.status_code != 200:
                raise ValueError(f"{answer.status_code}: {answer.read().decode()}")
            replica = answer.headers["x-pippin-replica"]
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    has_end = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    for choice in event["choices"]:
                        first = first or time.monotonic() - began
                        text += choice["delta"].get("content") or ""
                    usage = event.get("usage") or usage
        if not has_end or usage["completion_tokens"] != REPLY_TOKENS:
            raise ValueError(f"a stream without its end: {usage}")
        with self._lock:
            phase = self.phases[-1]
            phase.replies[replica] += 1
            phase.slowest = max(phase.slowest, first)
            if not is_first:
                phase.later_tokens += usage["prompt_tokens"]
                phase.cached += usage["prompt_tokens_details"]["cached_tokens"]
        return text


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    port, log = free_port(), folder / "ray.log"
    start = [str(BIN / "ray"), "start", "--head", "--block", "--num-cpus=2", f"--port={port}"]
    start += ["--node-ip-address=127.0.0.1", "--object-store-memory=200000000", "--include-dashboard=false"]
    start += [f"--temp-dir={folder}", "--disable-usage-stats"]
    with child(start, log, RAY_USAGE_STATS_ENABLED="0") as process:
        address, deadline = f"127.0.0.1:{port}", time.monotonic() + START_SECONDS
        status = [str(BIN / "ray"), "status", f"--address={address}"]
        while subprocess.run(status, capture_output=True, check=False).returncode:
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit(f"no cluster: {log.read_text()[-2000:]}")
            time.sleep(1)
        yield address


def deploy(address: str, folder: Path) -> str:
    import ray
    from ray import serve

    from pippin.cli.deploy_commands import read_plan
    from pippin.deploy import ray_application

    port = free_port()
    config = folder / "deployment.toml"
    config.write_text(
        f'model = "{MODEL}"\nport = {port}\nmemory = "1GB"\nalias = ["*"]\n'
        f"[ray]\nmax-replicas = 2\ntarget-ongoing-requests = {TARGET_REQUESTS}\n"
    )
    plan = read_plan(config)
    options = ray_application.deployment_options(plan)
    options["engine"]["autoscaling_config"] |= DELAYS
    ray_application.deployment_options = lambda plan: options  # type: ignore[assignment]
    ray.init(address=address, log_to_driver=False)
    serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
    serve.run(ray_application.build(plan.to_builtins()), name="pippin", route_prefix="/")
    return f"http://127.0.0.1:{port}"


def num_replicas() -> int:
    from ray import serve

    states = serve.status().applications["pippin"].deployments["engine"].replica_states
    return sum(states.values())


def num_running() -> int:
    from ray import serve

    return serve.status().applications["pippin"].deployments["engine"].replica_states.get("RUNNING", 0)


def wait_for(count: int) -> float:
    """Seconds until there are so many replicas, and no others that start or stop."""
    began = time.monotonic()
    while (num_replicas(), num_running()) != (count, count):
        if time.monotonic() - began > SCALE_SECONDS:
            raise SystemExit(f"{num_replicas()} replicas after {SCALE_SECONDS:.0f} seconds, not {count}")
        time.sleep(0.5)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=CLIENTS)
    args = parser.parse_args()
    random.seed(1)
    folder = Path(tempfile.mkdtemp(prefix="scaling-", dir="/tmp"))
    try:
        with cluster(folder) as address:
            clients = Clients(deploy(address, folder))
            try:
                clients.begin("one client", 1)
                time.sleep(STEADY_SECONDS)
                clients.phases[-1].show(num_replicas())
                phase = clients.begin(f"{args.clients} clients, a replica is added", args.clients)
                added = wait_for(2)
                phase.show(num_replicas())
                phase = clients.begin(f"{args.clients} clients", args.clients)
                time.sleep(STEADY_SECONDS)
                phase.show(num_replicas())
                phase = clients.begin("one client, a replica is removed", 1)
                removed = wait_for(1)
                phase.show(num_replicas())
                phase = clients.begin("one client again", 1)
                time.sleep(STEADY_SECONDS)
                phase.show(num_replicas())
            finally:
                clients.end()
            print(f"a replica was added after {added:.0f} s and removed after {removed:.0f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    broken = [text for phase in clients.phases for text in phase.broken]
    for text in broken:
        print(f"broken: {text}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
