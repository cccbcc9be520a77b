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


def test_each_of_two_models_may_have_replicas(tmp_path: Path) -> None:
    paths = [str(linked_copy(tmp_path / name)) for name in ("one", "two")]
    options = ("--memory", "1GB", "--replicas", "2")
    with serve(*paths, *options) as served:
        client = httpx.Client(base_url=served.url, timeout=PATIENCE_SECONDS)
        for model in ("one", "two"):
            message = {"role": "user", "content": "hello"}
            body = {"model": model, "messages": [message], "max_tokens": 4}
            assert client.post("/v1/chat/completions", json=body).json()["model"] == model
        assert len(children_of(served.process.pid)) == 4
        before = set(children_of(served.process.pid))

        def replicas(model: str) -> list[str]:
            status = client.get("/status", params={"model": model}).json()
            return [replica["state"] for replica in status["replicas"]]

        assert replicas("two") == ["serving", "serving"]
        metrics = client.get("/metrics").text
        assert 'pippin_replica_up{model_name="two",replica="1"} 1.0' in metrics
        answer = client.post("/restart_replicas", params={"model": "two"})
        assert answer.status_code == 202
        wait_until(lambda: len(set(children_of(served.process.pid)) - before) == 2)
        wait_until(lambda: replicas("two") == ["serving", "serving"])
        assert len(before & set(children_of(served.process.pid))) == 2, "those of the other"
        client.close()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE_SECONDS) == 0
