"""`/v1/files`: sent within limits, kept for its owner, and nothing is left of what failed."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine, build_app, say, serving
from test_batches import change, client_of, finished, line, send, start

from pippin.api.batches.store import Upload
from pippin.config import LimitsConfig, ServerConfig

FILE = {"file": ("in.jsonl", b"abc")}
BATCH = {"purpose": "batch"}
KEYS: dict[str, Any] = {"api_key": ("mine", "yours"), "admin_key": ("boss",)}


def contents(directory: Path) -> list[str]:
    """Beside the database."""
    return sorted(path.name for path in directory.rglob("*.jsonl"))


def test_a_file_is_sent_shown_read_and_deleted(tmp_path: Path) -> None:
    content = b"a\n" * 700_000
    with client_of(tmp_path / "new") as (client, _):
        assert not (tmp_path / "new").exists(), "nothing is created before it is needed"
        file = client.files.create(
            file=("in.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert (file.bytes, file.filename, file.purpose) == (len(content), "in.jsonl", "batch")
        assert file.expires_at == file.created_at + 3600
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).read() == content
        for path in (tmp_path / "new").rglob("*"):
            assert path.stat().st_mode & 0o077 == 0, "others may not read it"
        assert client.files.delete(file.id).deleted
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="No such File object"):
                gone(file.id)
    assert contents(tmp_path) == []


def test_files_are_there_after_a_restart_until_they_expire(tmp_path: Path) -> None:
    with client_of(tmp_path) as (client, _):
        kept, expired = (
            client.files.create(
                file=b"abc", purpose="batch", expires_after={"anchor": "created_at", "seconds": s}
            )
            for s in (3600, 7200)
        )
    change(tmp_path, "UPDATE files SET expires_at = 1 WHERE id = ?", expired.id)
    with client_of(tmp_path) as (client, _):
        assert list(client.files.list()) == [kept]
    assert contents(tmp_path) == [f"{kept.id}.jsonl"]


@pytest.fixture
def post(tmp_path: Path) -> Iterator[Any]:
    """Sends a form to a server with low limits."""
    config = ServerConfig(batch_dir=str(tmp_path), batch_file_bytes=500_000, batch_bytes=600_000)
    with serving(ScriptedEngine(say("Hello.")), config) as url:
        yield lambda **fields: httpx.post(f"{url}/v1/files", **fields)


def form(*parts: str, end: str = "--x--\r\n") -> dict[str, Any]:
    content = "".join(f"--x\r\nContent-Disposition: form-data; {part}\r\n" for part in parts) + end
    headers = {"content-type": "multipart/form-data; boundary=x"}
    return {"content": content.encode(), "headers": headers}


PURPOSE = 'name="purpose"\r\n\r\nbatch'
CONTENT = 'name="file"; filename="a"\r\n\r\nabc'
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"json": {}}, 415, "it must be multipart/form-data with a boundary"),
    ({"data": BATCH}, 415, "it must be multipart/form-data"),
    ({"files": FILE}, 400, "purpose is required"),
    ({"files": FILE, "data": {"purpose": "assistants"}}, 400, 'it must be \\"batch\\"'),
    ({"files": FILE, "data": {"purpose": "batch_output"}}, 400, 'it must be \\"batch\\"'),
    ({"files": FILE, "data": BATCH | {"x": "y"}}, 400, "x is not a field of this request"),
    ({"files": FILE, "data": BATCH | {"expires_after[seconds]": "1"}}, 400, "expires_after.anchor"),
    ({"files": FILE, "data": {"purpose": "b" * 2_000}}, 400, "Part exceeded maximum size of 1KB"),
    ({"files": {"file": ("a", b"")}, "data": BATCH}, 400, "file is missing or empty"),
    ({"files": {"other": ("a", b"c")}, "data": BATCH}, 400, "other is not a field"),
    (
        {"files": [("file", b"a"), ("file", b"b")], "data": BATCH},
        400,
        "Too many files",
    ),
    (
        {"files": FILE, "data": {f"x{i}": "" for i in range(17)}},
        400,
        "number of fields is 15",
    ),
    ({"files": {"file": b"c" * 500_001}, "data": BATCH}, 413, "larger than 500,000 bytes"),
    ({"files": {"file": b"c" * 900_000}, "data": BATCH}, 413, "limit for one file and its form"),
    (form(PURPOSE, CONTENT, end=""), 400, "no last boundary"),
    (form(PURPOSE, PURPOSE, CONTENT), 400, "purpose is given twice"),
    (form(f"{'x' * 9_000}\r\n\r\na"), 400, "is not an expected form"),
    ({"content": b"abc", "headers": form()["headers"]}, 400, "is not an expected form"),
    ({"content": b"", "headers": form()["headers"]}, 400, "no last boundary"),
    (
        {"content": b"", "headers": {"content-type": f"multipart/form-data; boundary={'x' * 999}"}},
        400,
        "is not an expected form",
    ),
]


@pytest.mark.parametrize(("fields", "status", "words"), REFUSED)
def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(
    post: Any, tmp_path: Path, fields: dict[str, Any], status: int, words: str
) -> None:
    reply = post(**fields)
    assert (reply.status_code, words in reply.text) == (status, True), reply.text
    assert contents(tmp_path) == []
    assert post(files={"file": b"c" * 500_000}, data=BATCH).status_code == 200, "all of the quota"


@pytest.mark.parametrize("part", [f"{CONTENT}{'c' * 2_000_000}", "behind the end"])
def test_a_body_without_a_length_is_read_up_to_the_limit(
    post: Any, tmp_path: Path, part: str
) -> None:
    behind = form(PURPOSE, CONTENT, end="--x--\r\n" + "c" * 2_000_000)
    whole = form(PURPOSE, part) if part.startswith(CONTENT) else behind
    pieces = (whole["content"][i : i + 1000] for i in range(0, len(whole["content"]), 1000))
    reply = post(content=pieces, headers=whole["headers"])
    assert reply.status_code == 413
    assert contents(tmp_path) == []


def test_the_quota_counts_all_files_and_is_released(post: Any) -> None:
    def store(nbytes: int) -> httpx.Response:
        reply: httpx.Response = post(files={"file": b"c" * nbytes}, data=BATCH)
        return reply

    first = store(400_000)
    full = store(200_001)
    assert full.json()["error"]["code"] == "storage_limit_exceeded"
    assert "more than 600,000 bytes" in full.text
    assert store(200_000).status_code == 200
    httpx.delete(f"{first.url}/{first.json()['id']}")
    assert store(400_000).status_code == 200


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pippin.api.batches.store.MAX_FILES", 2)
    with client_of(tmp_path) as (client, _):
        send(client, "a")
        send(client, "b")
        with pytest.raises(openai.BadRequestError, match="2 files are stored, and at most 2"):
            send(client, "c")


def test_a_large_file_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = Upload.write
    monkeypatch.setattr(
        Upload, "write", lambda self, data: (sizes.append(len(data)), write(self, data))
    )
    with client_of(tmp_path) as (client, _):
        client.files.create(file=os.urandom(5_000_000), purpose="batch")
    assert sum(sizes) == 5_000_000
    assert max(sizes) < 1_000_000


def test_a_body_that_stops_arriving_is_given_up(tmp_path: Path) -> None:
    limits, config = LimitsConfig(body_timeout=0.2), ServerConfig(batch_dir=str(tmp_path))
    head = (
        "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
    )
    with serving(ScriptedEngine(say("Hello.")), config, limits) as url:
        address = urlsplit(url)
        assert address.hostname is not None
        with socket.create_connection((address.hostname, address.port or 0)) as slow:
            slow.sendall(head.encode() + form(PURPOSE, CONTENT, end="")["content"])
            assert b"408" in slow.recv(1000)
    assert contents(tmp_path) == []


def test_a_full_disk_is_an_error_of_the_upload_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with client_of(tmp_path) as (client, _):
        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", full)
            with pytest.raises(openai.InternalServerError, match="No space left") as caught:
                send(client, "a")
        assert caught.value.status_code == 507
        assert contents(tmp_path) == []
        assert send(client, "a").bytes == 1


# ---- owners ----------------------------------------------------------------------------------


def test_a_key_cannot_see_or_use_what_another_has(tmp_path: Path) -> None:
    with client_of(tmp_path, **KEYS) as (mine, engine):
        file = send(mine, line("a"))
        batch = finished(mine, start(mine, line("a")))
        for key in ("yours", "boss"):
            other = mine.copy(api_key=key)
            assert list(other.files.list()) == []
            assert list(other.batches.list()) == []
            for call in (other.files.retrieve, other.files.content, other.files.delete):
                for id in (file.id, batch.output_file_id):
                    with pytest.raises(openai.NotFoundError):
                        call(id)
            for call in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError, match="No batch found with id"):
                    call(batch.id)
            with pytest.raises(openai.NotFoundError):
                other.batches.create(
                    input_file_id=file.id,
                    endpoint="/v1/chat/completions",
                    completion_window="24h",
                )
        mine.chat.completions.create(model="stories", messages=[{"role": "user", "content": "a"}])
        assert engine.submits[0].salt == engine.submits[1].salt != b"", "they share prefixes"
        with pytest.raises(openai.AuthenticationError):
            mine.copy(api_key="none").files.list()
    with client_of(tmp_path, **KEYS) as (mine, _):
        assert len(list(mine.files.list())) == 3
        assert list(mine.copy(api_key="yours").files.list()) == [], "nor after a restart"
        assert list(mine.copy(api_key="yours").batches.list()) == []
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("*.sqlite3*"))
    assert b"mine" not in stored


def test_each_key_has_its_share_of_the_quota(tmp_path: Path) -> None:
    with client_of(tmp_path, batch_bytes=3_000, **KEYS) as (mine, _):
        send(mine, "x" * 1_000)
        with pytest.raises(openai.BadRequestError, match="more than 1,000 bytes"):
            send(mine, "x")
        assert send(mine.copy(api_key="yours"), "x" * 1_000).bytes == 1_000


def test_a_path_is_not_an_id(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text("secret")
    with client_of(tmp_path) as (client, _):
        send(client, "a")
        for id in ("..%2Fsecret", "../secret", "%2e%2e/secret", "lock", "file-*"):
            assert httpx.get(f"{client.base_url}files/{id}/content").status_code == 404


def test_without_room_for_files_there_are_none() -> None:
    with serving(ScriptedEngine(say("Hello."))) as url:
        for path in ("files", "batches"):
            reply = httpx.get(f"{url}/v1/{path}")
            assert (reply.status_code, "--batch-bytes" in reply.text) == (404, True)


def test_a_directory_in_use_is_refused_by_a_second_server(tmp_path: Path) -> None:
    with client_of(tmp_path) as (client, _):
        send(client, "a")
        config = ServerConfig(batch_dir=str(tmp_path))
        second = build_app(ScriptedEngine(say("a")), config)
        second.resume_batches()  # a warning, and it serves all else
        transport = httpx.ASGITransport(second)

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.get("/v1/files")

        reply = asyncio.run(ask())
    assert reply.status_code == 503
    assert "--batch-dir of its own" in reply.text
