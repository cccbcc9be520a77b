"""Batches of a real server: its process is killed in the middle, and another one goes on."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from processes import PATIENCE_SECONDS, Served, children_of, wait_until, wait_until_gone
from test_serve import serve

pytestmark = pytest.mark.slow

NUM_LINES = 60
ENDS = ("completed", "failed", "expired", "cancelled")


def line(number: int) -> str:
    body = {
        "model": "stories-hybrid-20m",
        "messages": [{"role": "user", "content": f"Count from {number}."}],
        "max_tokens": 64,
        "ignore_eos": True,
    }
    url = "/v1/chat/completions"
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body})


def client_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="a", timeout=PATIENCE_SECONDS)


def kill(served: Served) -> None:
    """The server, as the system does when memory is short; its engine notices and exits."""
    engines = children_of(served.process.pid)
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait()
    for engine in engines:
        wait_until_gone(engine)


def stored(directory: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(directory / "batches.sqlite3")) as database:
        return [value for (value,) in database.execute(query)]


def test_a_batch_survives_the_death_of_its_server(tmp_path: Path) -> None:
    options = ("--batch-dir", str(tmp_path), "--batch-running", "2")
    with serve(*options) as served, client_of(served) as client:
        content = "\n".join(map(line, range(NUM_LINES))).encode()
        file = client.files.create(file=content, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        def completed() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            assert counts is not None
            return counts.completed

        wait_until(lambda: completed() >= 3)
        kill(served)
    before = [json.loads(line) for line in stored(tmp_path, "SELECT line FROM results")]
    assert 3 <= len(before) < NUM_LINES, "it was killed in the middle"
    with serve(*options) as served, client_of(served) as client:
        wait_until(lambda: client.batches.retrieve(batch.id).status in ENDS)
        done = client.batches.retrieve(batch.id)
        assert done.status == "completed"
        assert done.output_file_id is not None
        rows = [json.loads(r) for r in client.files.content(done.output_file_id).text.splitlines()]
    assert rows[: len(before)] == before, "what had a result was not run again"
    assert sorted(row["custom_id"] for row in rows) == sorted(f"r{i}" for i in range(NUM_LINES))
    assert {row["response"]["status_code"] for row in rows} == {200}


def test_a_server_that_is_stopped_does_not_wait_for_its_batches(tmp_path: Path) -> None:
    with serve("--batch-dir", str(tmp_path)) as served, client_of(served) as client:
        content = "\n".join(map(line, range(2_000))).encode()
        file = client.files.create(file=content, purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE_SECONDS) == 0
    (record,) = map(json.loads, stored(tmp_path, "SELECT batch FROM batches"))
    assert record["status"] == "in_progress", "it goes on at the next start"
