"""Two servers, one that computes prompts and one that decodes, and what a client notices."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import httpx
import pytest

from metric_names import documented, families
from processes import Served, wait_until
from test_serve import serve

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ask(served: Served, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "stories-hybrid-20m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def complete(served: Served, prompt: list[int]) -> str:
    return str(ask(served, prompt)["choices"][0]["text"])


def metric(served: Served, name: str) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def test_a_server_decodes_what_another_one_computed_and_outlives_it() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        serve("--role", "prefill", "--peer-listen", address) as prefill,
        serve("--role", "decode", "--peer", address) as decode,
        serve() as alone,
    ):
        wait_until(lambda: metric(decode, "pippin_handover_peers") == 1)
        prompt = [3 + number % 90 for number in range(1_000)]
        reply = ask(decode, prompt)
        assert reply["choices"][0]["text"] == complete(alone, prompt)
        details = {"cached_tokens": 1_000, "peer_cached_tokens": 1_000}
        assert reply["usage"]["prompt_tokens_details"] == details
        assert metric(decode, "pippin_handover_arrived_total") == 1
        assert metric(prefill, "pippin_handover_pushes_sent_total") == 1
        sent = metric(prefill, "pippin_handover_sent_bytes_total")
        assert metric(decode, "pippin_handover_received_bytes_total") == sent > 0
        assert metric(decode, "pippin_computed_tokens_total") == 0
        texts = [httpx.get(f"{each.url}/metrics").text for each in (prefill, decode)]
        known = {name for text in texts for name in families(text)}
        assert {name for name in documented() if name.startswith("pippin_handover_")} <= known

        os.kill(prefill.engine_pid, signal.SIGKILL)  # its supervisor starts another one
        other = [5 + number % 80 for number in range(1_000)]
        assert complete(decode, other) == complete(alone, other)
        wait_until(lambda: metric(decode, "pippin_handover_peers") == 1)
        prefill.process.kill()
        wait_until(lambda: metric(decode, "pippin_handover_peers") == 0)
        third = [7 + number % 70 for number in range(1_000)]
        assert complete(decode, third) == complete(alone, third)
        assert metric(decode, "pippin_computed_tokens_total") > 0
