"""Two replicas behind one server, as far as one machine shows them: who served what, a restart, and a death.

    python tools/replicas_served.py MODEL --backend torch --memory 40GB -- --devices 0,0
    python tools/replicas_served.py                  the bundled model, `--replicas 2` on this machine's CPU

Sends prompts one at a time, then all of them at once, and compares the greedy replies. Then streams run while
`POST /restart_replicas` replaces both engines, and while the engine of one replica is killed: prints how many were
whole, cut, or moved. Exit status 1 if a stream was cut by the restart, if the kill cut those of both replicas, or
if a replica did not serve. On NVIDIA GPUs it prints what nvidia-smi says of their memory.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from bundled import BUNDLED_PATH  # noqa: E402
from pippin.bench.client.wire import Target  # noqa: E402
from pippin.bench.servers.processes import pippin_server  # noqa: E402
from processes import children_of  # noqa: E402

PROMPT_TOKENS, REPLY_TOKENS, STREAM_TOKENS = 600, 48, 1_500
NUM_PROMPTS, NUM_STREAMS = 16, 8
RESTART_SECONDS = 300.0
LEAST_TOKEN = 3  # of prompts: those before it are special


class Server:
    def __init__(self, target: Target) -> None:
        self._model = target.model
        self._client = httpx.Client(base_url=target.url, timeout=600)

    def ask(self, prompt: list[int], max_tokens: int = REPLY_TOKENS) -> str | None:
        """The text of a whole reply; None if it was cut, which is printed."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"ignore_eos": True, "temperature": 0}
        answer = self._client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            return str(answer.json()["choices"][0]["text"])
        print(f"    {answer.status_code}: {answer.text}", flush=True)
        return None

    @property
    def replicas(self) -> list[dict[str, Any]]:
        return list(self._client.get("/status").json()["replicas"])

    def served(self) -> list[int]:
        """Prompt tokens that each engine has computed."""
        lines = self._client.get("/metrics").text.splitlines()
        name = "pippin_computed_tokens_total{"
        return [int(float(line.split()[-1])) for line in lines if line.startswith(name)]

    def restart(self) -> None:
        self._client.post("/restart_replicas").raise_for_status()

    def wait_until_served(self) -> float:
        """Seconds until all replicas serve."""
        began = time.monotonic()
        while any(replica["state"] != "serving" for replica in self.replicas):
            if time.monotonic() - began > RESTART_SECONDS:
                raise SystemExit(f"not all replicas serve: {self.replicas}")
            time.sleep(0.2)
        return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=str(BUNDLED_PATH), help="a directory")
    parser.add_argument("--backend", default="mlx")
    parser.add_argument("--memory", default="1GB", help="of all replicas")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    replicas = sys.argv[at + 1 :] or ["--replicas", "2"]
    began = time.monotonic()
    with pippin_server(
        args.model, ["--backend", args.backend, "--memory", args.memory, *replicas]
    ) as target:
        server = Server(target)
        waited = server.wait_until_served()
        print(
            f"started in {time.monotonic() - began:.0f} s, both replicas {waited:.0f} s later",
            flush=True,
        )
        show_gpus()
        fine = compare(server)
        fine &= restart(server)
        fine &= kill(server)
    return 0 if fine else 1


def compare(server: Server) -> bool:
    rng = random.Random(1)
    prompts = [
        [rng.randrange(LEAST_TOKEN, 8_000) for _ in range(PROMPT_TOKENS)]
        for _ in range(NUM_PROMPTS)
    ]
    alone = [server.ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(NUM_PROMPTS) as clients:
        together = list(clients.map(server.ask, prompts))
    equal = sum(one == other for one, other in zip(alone, together, strict=True))
    served = server.served()
    print(f"{equal} of {NUM_PROMPTS} replies equal; prompt tokens that each replica computed: {served}", flush=True)
    return all(served) and len(served) == len(server.replicas) and None not in [*alone, *together]


def restart(server: Server) -> bool:
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        streams = [
            clients.submit(server.ask, [LEAST_TOKEN + n] * 300, STREAM_TOKENS)
            for n in range(NUM_STREAMS)
        ]
        time.sleep(1)
        before = children()
        server.restart()
        time.sleep(1)
        seconds = 1 + server.wait_until_served()
        cut = sum(stream.result() is None for stream in streams)
    kept = set(before) & set(children())
    print(
        f"restarted in {seconds:.0f} s, {len(kept)} engines kept; {cut} of {NUM_STREAMS} streams cut",
        flush=True,
    )
    return not cut and not kept


def kill(server: Server) -> bool:
    with ThreadPoolExecutor(NUM_STREAMS) as clients:
        streams = [
            clients.submit(server.ask, [LEAST_TOKEN + n] * 400, STREAM_TOKENS)
            for n in range(NUM_STREAMS)
        ]
        time.sleep(1)
        victim = children()[0]
        os.kill(victim, signal.SIGKILL)
        cut = sum(stream.result() is None for stream in streams)
    again = server.wait_until_served()
    print(
        f"one engine killed: {cut} of {NUM_STREAMS} streams cut; both serve again after {again:.0f} s",
        flush=True,
    )
    return cut < NUM_STREAMS and server.ask([5] * 300) is not None


def children() -> list[int]:
    """Engines of the server that this process started."""
    return [engine for child in children_of(os.getpid()) for engine in children_of(child)]


def show_gpus() -> None:
    if shutil.which("nvidia-smi"):
        fields = [
            "nvidia-smi",
            "--query-gpu=index,memory.used,memory.total",
            "--format=csv,noheader",
        ]
        print(
            subprocess.run(fields, capture_output=True, text=True, check=False).stdout.strip(),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
