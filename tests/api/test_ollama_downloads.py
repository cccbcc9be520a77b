"""Ollama's pull and delete, by its own client, with a hub on this machine."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from scripted_engine import MODEL as SERVED
from scripted_engine import ScriptedEngine, answer_anything, serving

from cases import cases
from fake_hub import COMMIT, CONFIG, FILES, MODEL, FakeHub, fake_hub
from pippin.api.http.access_control import check_downloads
from pippin.config import ServerConfig
from pippin.errors import PippinError
from pippin.hub import download
from pippin.startup.server_file import announced
from processes import environment, wait_until

TOTAL = len(FILES["model.safetensors"]) + len(CONFIG)
SNAPSHOT = Path("models--some--model", "snapshots", COMMIT)
pulls = pytest.mark.slow  # each starts a process


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with fake_hub() as hub:
        hub.use(monkeypatch, cache)
        yield hub


@contextlib.contextmanager
def client_of(config: ServerConfig | None = None, **headers: str) -> Iterator[Any]:
    with (
        serving(ScriptedEngine(answer_anything), config) as url,
        ollama.Client(url, headers=headers) as client,
    ):
        yield client


@pulls
@pytest.mark.parametrize("name", [MODEL, f"{MODEL}:latest", f"hf.co/{MODEL}:main"])
def test_a_pull_reports_its_progress_and_the_model_is_in_the_cache(
    hub: FakeHub, cache: Path, name: str
) -> None:
    with client_of() as client:
        first, *counts, _, _, last = client.pull(name, stream=True)
    assert (first.status, last.status) == ("pulling manifest", "success")
    assert {(each.digest, each.total) for each in counts} == {(COMMIT, TOTAL)}
    assert [each.completed for each in counts] == sorted(each.completed for each in counts)
    assert counts[-1].completed == TOTAL
    assert (cache / SNAPSHOT / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pulls
def test_a_pull_without_a_stream_is_one_object(hub: FakeHub, cache: Path) -> None:
    with client_of() as client:
        assert client.pull(MODEL).status == "success"
    assert (cache / SNAPSHOT / "config.json").exists()


@pulls
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_pulled_is_an_error_of_ollamas_shape(hub: FakeHub, stream: bool) -> None:
    with client_of() as client, pytest.raises(ollama.ResponseError, match="was not found"):
        list(client.pull("no/model", stream=stream))


@pulls
def test_a_machine_without_a_network_says_so(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # refuses connections
    with client_of() as client, pytest.raises(ollama.ResponseError, match="is offline") as caught:
        client.pull(MODEL)
    assert caught.value.status_code == 502


@pulls
def test_a_client_that_disconnects_stops_its_download(hub: FakeHub, cache: Path) -> None:
    """And another one may start then, which finishes."""
    hub.stalls.set()
    blobs = cache / "models--some--model" / "blobs"
    with client_of() as client:
        progress = client.pull(MODEL, stream=True)
        next(progress)
        wait_until(lambda: list(blobs.glob("*.incomplete")))
        with pytest.raises(ollama.ResponseError, match=f"{MODEL} is being downloaded") as caught:
            client.pull("other/model")
        assert caught.value.status_code == 503
        progress.close()
        wait_until(lambda: not list(blobs.glob("*.incomplete")))
        hub.stalls.clear()

        def pulled() -> bool:
            with contextlib.suppress(ollama.ResponseError):  # until the first process is gone
                return bool(client.pull(MODEL).status == "success")
            return False

        wait_until(pulled)


@pytest.mark.parametrize("name", ["stories", "stories:latest", "gpt-4o"])
def test_the_model_that_is_served_needs_no_download(hub: FakeHub, name: str) -> None:
    with client_of() as client:
        assert [each.status for each in client.pull(name, stream=True)] == ["success"]
    assert hub.paths == []


@pytest.mark.parametrize(
    "name", ["llama3", "a/b/c", "../..:x", "a/b:../x", "a/b:-x", "a/b:" + "x" * 129, "--json"]
)
def test_a_name_that_is_no_id_of_the_hub_is_a_400(hub: FakeHub, name: str) -> None:
    with client_of() as client, pytest.raises(ollama.ResponseError) as caught:
        client.pull(name)
    assert caught.value.status_code == 400
    assert hub.paths == []


def test_any_name_that_is_accepted_and_no_id_of_the_hub_is_the_served_model(hub: FakeHub) -> None:
    any_name = replace(SERVED, aliases=("*",))
    with (
        serving(ScriptedEngine(answer_anything), model=any_name) as url,
        ollama.Client(url) as client,
    ):
        assert client.pull("gpt-oss:20b").status == "success"


KEYS = ServerConfig(api_key=("one", "two"), admin_key=("admin",))


@cases(
    ("config", "headers", "client", "is_allowed"),
    [
        (ServerConfig(), {}, "127.0.0.1", True),
        (ServerConfig(), {}, "::1", True),
        (ServerConfig(), {}, "::ffff:127.0.0.1", True),
        (ServerConfig(), {}, "192.168.1.7", False),
        (ServerConfig(), {}, None, False),
        (ServerConfig(allow_pull="on"), {}, "192.168.1.7", True),
        (ServerConfig(allow_pull="off"), {}, "127.0.0.1", False),
        (KEYS, {"owner": "one"}, "127.0.0.1", False),
        (KEYS, {"owner": "admin"}, "192.168.1.7", True),
        (ServerConfig(api_key=("one",)), {"owner": "one"}, "192.168.1.7", True),
    ],
)
def test_who_may_fill_the_disk(
    config: ServerConfig, headers: dict[str, str], client: str | None, is_allowed: bool
) -> None:
    owner = hashlib.sha256(headers.get("owner", "").encode()).digest()
    scope = {"client": client and (client, 5), "state": {"owner": owner}}
    if is_allowed:
        check_downloads(config, scope)
    else:
        with pytest.raises(PippinError):
            check_downloads(config, scope)


@pytest.mark.parametrize("path", ["pull", "delete"])
def test_an_api_key_that_is_no_admin_key_is_refused(hub: FakeHub, path: str) -> None:
    with (
        client_of(KEYS, authorization="Bearer one") as client,
        pytest.raises(ollama.ResponseError, match="admin key") as caught,
    ):
        getattr(client, path)(MODEL)
    assert caught.value.status_code == 403
    assert hub.paths == []


def test_a_model_is_deleted_unless_it_is_served(hub: FakeHub, cache: Path) -> None:
    path = download(MODEL)
    with client_of() as client:
        with (
            announced("http://127.0.0.1:1", "m", str(path)),
            pytest.raises(ollama.ResponseError, match="is served at http://127") as caught,
        ):
            client.delete(MODEL)
        assert caught.value.status_code == 400
        assert path.exists()
        assert client.delete(MODEL).status == "success"
        assert not (cache / "models--some--model").exists()
        with pytest.raises(ollama.ResponseError, match="no model 'some/model' is in") as caught:
            client.delete(MODEL)
    assert caught.value.status_code == 404


def test_fields_of_accounts_are_ignored_and_reported(hub: FakeHub) -> None:
    body = {"name": "stories", "insecure": True, "username": "u", "password": ""}
    with serving(ScriptedEngine(answer_anything)) as url:
        reply = httpx.post(f"{url}/api/pull", json={**body, "stream": False})
    assert reply.json() == {"status": "success"}
    assert reply.headers["x-pippin-ignored"] == "insecure, username"
