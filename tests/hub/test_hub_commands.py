"""`pippin pull`, `list` and `rm`, with a hub on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.commands import error_of, output_of
from fake_hub import COMMIT, CONFIG, FILES, MODEL, FakeHub, fake_hub
from pippin import cli
from pippin.config import ModelConfig
from pippin.hub import SPARE_BYTES, cached_models
from pippin.startup.checkpoint import find_checkpoint
from pippin.startup.server_file import announced
from processes import environment, wait_until


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "hub"


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with fake_hub() as hub:
        hub.use(monkeypatch, cache)
        yield hub


@pytest.fixture
def offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # refuses connections


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    found = json.loads(output_of(capsys, "list", "--json"))
    assert isinstance(found, list)
    return found


def test_only_files_that_are_read_are_pulled(
    hub: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = cache / "models--some--model" / "snapshots" / COMMIT
    assert output_of(capsys, "pull", MODEL).strip() == f"{MODEL} is at {snapshot}"
    assert sorted(path.name for path in snapshot.iterdir()) == ["config.json", "model.safetensors"]
    assert (snapshot / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert find_checkpoint(ModelConfig(MODEL)) == snapshot  # as `pippin serve` finds it


def test_progress_is_printed_as_lines(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    first, *counts, _, _, last = map(
        json.loads, output_of(capsys, "pull", MODEL, "--json").splitlines()
    )
    assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
    total = len(FILES["model.safetensors"]) + len(CONFIG)
    assert counts[-1] == {
        "status": "pulling 0123456789ab",
        "digest": COMMIT,
        "total": total,
        "completed": total,
    }
    again = output_of(capsys, "pull", MODEL, "--json").splitlines()
    assert json.loads(again[1])["total"] == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no/model"], "model 'no/model' was not found: there is no such directory, and on the"),
        ([MODEL, "--revision", "v9"], "model 'some/model' has no revision 'v9'"),
        (["gated/model"], "is gated: request access at https://huggingface.co/gated/model"),
        (["gguf/model"], "model 'gguf/model' has no model*.safetensors: Pippin loads no other"),
        (["llama3"], "'llama3' is not a Hugging Face id: use owner/name"),
        (["../.."], "'../..' is not a Hugging Face id: use owner/name"),
        (["a--b/c"], "model 'a--b/c' is not a valid Hugging Face id"),
    ],
)
def test_what_cannot_be_pulled_is_one_line_that_says_what_to_do(
    hub: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    hub.models |= {"gated/model": FILES, "gguf/model": {"model.gguf": b"g", "config.json": CONFIG}}
    hub.gated.add("gated/model")
    status, text = error_of(capsys, "pull", *argv)
    assert status == 1
    assert message in text
    assert not list(cache.glob("*/blobs/*"))
    with pytest.raises(SystemExit) as exited:
        cli.main(["pull", "--json", *argv])
    assert exited.value.code == 1
    assert message in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


@pytest.mark.usefixtures("offline")
def test_a_machine_without_a_network_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = error_of(capsys, "pull", MODEL)
    assert status == 1
    assert f"model '{MODEL}' cannot be downloaded: this machine is offline, or the Hugging" in text


def test_a_connection_that_is_lost_is_one_line(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx2
    import huggingface_hub

    def lose(*_: Any, **options: Any) -> Any:
        if options.get("dry_run"):
            return download(*_, **options)
        raise httpx2.ReadError("Connection reset by peer")

    download = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lose)
    status, text = error_of(capsys, "pull", MODEL)
    assert status == 1
    assert "cannot be downloaded: this machine is offline, or the Hugging Face hub" in text


def test_a_model_that_does_not_fit_the_disk_is_not_pulled(
    hub: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = SPARE_BYTES + 100_000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    status, text = error_of(capsys, "pull", MODEL)
    assert status == 1
    assert f"model '{MODEL}' needs 100.0 KB more on the disk, and {cache} has 1.0 GB free" in text
    assert not any(path.endswith("safetensors") for path in hub.paths if path.startswith("GET"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_download_at_once_and_leaves_no_part_of_a_file(
    hub: FakeHub, cache: Path, number: int
) -> None:
    hub.stalls.set()
    command = [sys.executable, "-m", "pippin", "pull", MODEL]
    env = environment() | hub.environment(cache)
    blobs = cache / "models--some--model" / "blobs"
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: list(blobs.glob("*.incomplete")))
        process.send_signal(number)
    assert process.returncode == 128 + number
    assert not list(blobs.glob("*.incomplete"))


@pytest.mark.slow
def test_a_download_ends_when_its_lines_are_no_longer_read(hub: FakeHub, cache: Path) -> None:
    hub.stalls.set()
    command = [sys.executable, "-m", "pippin", "pull", "--json", MODEL]
    env = environment() | hub.environment(cache)
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    blobs = cache / "models--some--model" / "blobs"
    wait_until(lambda: list(blobs.glob("*.incomplete")))
    process.stdout.close()
    assert process.wait() == 128 + signal.SIGPIPE
    assert not list(blobs.glob("*.incomplete"))


def test_models_are_listed_with_what_can_be_served(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No model is in the Hugging Face hub's cache" in output_of(capsys, "list")
    assert listed(capsys) == []
    own_code = {**FILES, "config.json": b'{"model_type": "llama", "model_file": "own.py"}'}
    new_kind = {**FILES, "config.json": b'{"model_type": "not_known_here"}'}
    hub.models |= {"own/code": own_code, "new/kind": new_kind}
    for name in hub.models:
        output_of(capsys, "pull", name)
    found = {model["name"]: model for model in listed(capsys)}
    assert {name: model["servable"] for name, model in found.items()} == {
        MODEL: "yes",
        "own/code": "no",
        "new/kind": "unknown",
    }
    assert "needs its own model code (own.py)" in found["own/code"]["reason"]
    assert found[MODEL]["bytes"] == len(FILES["model.safetensors"]) + len(CONFIG)
    assert found[MODEL]["served_at"] is None
    shown = output_of(capsys, "list")
    assert MODEL in shown
    assert "100.0 KB" in shown


def test_the_model_that_was_used_last_is_listed_first(
    hub: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.models["other/model"] = {**FILES, "model.safetensors": b"other"}
    for name in (MODEL, "other/model"):
        output_of(capsys, "pull", name)
    for seconds, folder in enumerate(["models--other--model", "models--some--model"], 1):
        for blob in (cache / folder / "blobs").iterdir():
            os.utime(blob, (seconds, seconds))
    assert [model["name"] for model in listed(capsys)] == [MODEL, "other/model"]
    assert listed(capsys)[0]["last_used"] == "1970-01-01T00:00:02+00:00"


def test_a_model_is_deleted_with_the_bytes_that_are_freed(
    hub: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.models["copy/model"] = FILES  # has the same commit
    for name in hub.models:
        output_of(capsys, "pull", name)
    nbytes = len(FILES["model.safetensors"]) + len(CONFIG)
    said = output_of(capsys, "rm", "Some/Model", "--yes")
    assert said.strip() == f"Deleted {MODEL}: {nbytes:,} bytes freed."
    assert not (cache / "models--some--model").exists()
    status, text = error_of(capsys, "rm", MODEL, "--yes")
    assert (status, text) == (
        1,
        f"pippin: no model '{MODEL}' is in the Hugging Face hub's cache; it contains copy/model",
    )


def test_deleting_asks_first(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output_of(capsys, "pull", MODEL)
    status, text = error_of(capsys, "rm", MODEL)
    assert status == 2
    assert "there is no terminal: use --yes" in text
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer in ("", "n", "no"):
        monkeypatch.setattr("builtins.input", lambda asked, answer=answer: answer)
        assert "Nothing was deleted." in output_of(capsys, "rm", MODEL)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    assert f"Deleted {MODEL}" in output_of(capsys, "rm", MODEL)
    assert asked[0].startswith(f"Delete {MODEL} (100.0 KB) from ")


def test_a_model_that_a_server_serves_is_not_deleted(
    hub: FakeHub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output_of(capsys, "pull", MODEL)
    (model,) = cached_models()
    with announced("http://127.0.0.1:4321", "m", str(model.snapshot)):
        status, text = error_of(capsys, "rm", MODEL, "--yes")
        assert listed(capsys)[0]["served_at"] == "http://127.0.0.1:4321"
    assert status == 1
    assert "is served at http://127.0.0.1:4321" in text
    assert model.path.exists()
