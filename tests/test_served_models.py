"""Two models of one server in memory for one, with real processes: from start to SIGTERM."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from bundled import BUNDLED_PATH
from processes import PATIENCE_SECONDS, children_of, wait_until
from test_serve import serve

pytestmark = pytest.mark.slow


def linked_copy(folder: Path) -> Path:
    folder.mkdir()
    for file in BUNDLED_PATH.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_two_models_take_turns_and_no_stream_is_cut(tmp_path: Path) -> None:
    paths = [str(linked_copy(tmp_path / name)) for name in ("one", "two")]
    options = ("--memory", "300MB", "--model-turn", "0", "--fake-step", "0.005")
    with serve(*paths, *options) as served:
        client = httpx.Client(base_url=served.url, timeout=PATIENCE_SECONDS)

        def body(model: str, max_tokens: int) -> dict[str, object]:
            message = {"role": "user", "content": "hello"}
            fields = {"model": model, "messages": [message], "ignore_eos": True}
            return {**fields, "max_tokens": max_tokens, "stream": max_tokens > 10}

        assert children_of(served.process.pid) == [], "nothing is loaded before a request"
        with client.stream("POST", "/v1/chat/completions", json=body("one", 400)) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            reply = client.post("/v1/chat/completions", json=body("two", 4))
            assert reply.json()["model"] == "two"
            assert reply.headers["x-pippin-load-place"] == "1"
            assert "data: [DONE]" in list(lines), "it was not cut"
        loaded = [model["name"] for model in client.get("/api/ps").json()["models"]]
        assert loaded == ["two:latest"]
        wait_until(lambda: len(children_of(served.process.pid)) == 1)
        unload = {"model": "two", "keep_alive": 0}
        assert client.post("/api/generate", json=unload).json()["done_reason"] == "unload"
        wait_until(lambda: children_of(served.process.pid) == [])
        assert client.get("/health").status_code == 200
        client.close()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE_SECONDS) == 0
