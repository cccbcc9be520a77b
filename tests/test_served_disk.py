"""A server with a cache on disk: what a restart finds, after SIGTERM and after `kill -9`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from metric_names import documented, families, names_in_dashboard
from processes import (
    PATIENCE_SECONDS,
    children_of,
    environment_without_compiler,
    serve,
    wait_until,
)

pytestmark = pytest.mark.slow

MODEL = "stories-hybrid-20m"
STORY = " ".join(f"Once there was a fox who had {n} friends." for n in range(60))
ASK = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "temperature": 0, "logprobs": 2}

ELSEWHERE = ("pippin_spec_decode_", "pippin_handover_", "pippin_replica_")


@contextmanager
def server(directory: Path, end: signal.Signals) -> Iterator[str]:
    """`end`: what it and its engine hear in the end."""
    options = ("--cache-dir", str(directory), "--disk", "100MB")
    with serve(*options, env=environment_without_compiler()) as served:
        yield served.url
        process = served.process
        for pid in [process.pid, *children_of(process.pid)] if end is signal.SIGKILL else []:
            os.kill(pid, signal.SIGKILL)
        process.send_signal(end)
        process.wait(PATIENCE_SECONDS)


def ask(url: str, **more: Any) -> dict[str, Any]:
    reply: dict[str, Any] = httpx.post(f"{url}/v1/completions", json=ASK | more).json()
    return reply


def wait_until_written(url: str) -> None:
    """The reply's end, which is written last: two states, one of them at its end."""
    wait_until(lambda: httpx.get(f"{url}/status").json()["disk"]["spilled_entries"] >= 5)


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_restores_the_prompt_and_says_the_same(
    tmp_path: Path, end: signal.Signals
) -> None:
    with server(tmp_path, end) as url:
        first = ask(url)
        if end is signal.SIGKILL:
            wait_until_written(url)
    with server(tmp_path, end) as url:
        again = ask(url)
        metrics = httpx.get(f"{url}/metrics").text
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    length = first["usage"]["prompt_tokens"]
    details = {"cached_tokens": length, "disk_cached_tokens": length}
    assert again["usage"]["prompt_tokens_details"] == details
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert f'pippin_prompt_tokens_loaded_total{{tier="disk"}} {float(length)}' in metrics
    names = {sample.name for family in families(metrics).values() for sample in family.samples}
    # Without a compiler no drafts are verified here, and no engine computes prompts for this one
    # (tests/test_served_handover.py).
    missing = (names_in_dashboard() - names) | (documented() - families(metrics).keys())
    assert {name for name in missing if not name.startswith(ELSEWHERE)} == set()


def test_a_second_server_is_refused_the_directory(tmp_path: Path) -> None:
    with server(tmp_path, signal.SIGTERM):
        options = ["--port", "0", "--cache-dir", str(tmp_path), "--disk", "100MB"]
        command = [sys.executable, "-m", "pippin", "serve", *options]
        second = subprocess.run(
            command, env=environment_without_compiler(), capture_output=True, text=True, check=False
        )
    assert second.returncode != 0
    assert "in use" in second.stdout + second.stderr
