"""The page's files over real HTTP: who gets them, with which headers, and how large they are."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say, serving

from cases import cases
from pippin.api.app import create_waiting_app
from pippin.api.page import FILES, page_files, page_paths
from pippin.config import ServerConfig

MAX_BYTES = 150_000
SCRIPTS = sorted(FILES.rglob("*.js"))


def fetch(path: str, config: ServerConfig | None = None, **options: Any) -> httpx.Response:
    with serving(ScriptedEngine(say("Hi.")), config) as url:
        return httpx.request(options.pop("method", "GET"), url + path, **options)


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/app.js", "text/javascript; charset=utf-8"),
        ("/page/style/base.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_each_kind_of_file_comes_as_what_it_is(path: str, media_type: str) -> None:
    reply = fetch(path)
    assert (reply.status_code, reply.headers["content-type"]) == (200, media_type)
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-cache"


def test_the_policy_allows_this_server_alone_and_nothing_inline() -> None:
    policy = fetch("/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("default-src") == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert set(rules.values()) == {"'self'", "'none'", "'script'"}
    assert "unsafe" not in policy
    assert "http" not in policy


def test_the_page_needs_nothing_that_the_policy_forbids() -> None:
    html = (FILES / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|//", html)
    for path in FILES.rglob("*.*"):
        text = path.read_text().replace("http://www.w3.org/", "")
        assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|document\.write", text), path
        assert not re.search(r"@import|\burl\((?!#)", text), path


@cases("script", SCRIPTS, ids=lambda path: path.relative_to(FILES).as_posix())
def test_every_import_leads_to_a_file(script: Any) -> None:
    for name in re.findall(r'^import .*?from "([^"]+)";', script.read_text(), re.M | re.S):
        assert (script.parent / name).is_file(), f"{script.name} imports {name}"


def test_all_files_together_are_small() -> None:
    assert sum(len(file.content) for file in page_files()) < MAX_BYTES


def test_an_unchanged_file_is_not_sent_again() -> None:
    etag = fetch("/page/app.js").headers["etag"]
    again = fetch("/page/app.js", headers={"if-none-match": f'"other", W/{etag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == etag
    assert fetch("/page/app.js", headers={"if-none-match": '"other"'}).status_code == 200


def test_a_head_is_the_headers_alone() -> None:
    whole, head = fetch("/"), fetch("/", method="HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]
    assert fetch("/", method="POST").status_code == 405


def test_the_files_need_no_key_and_the_api_does() -> None:
    keys = ServerConfig(api_key=("k",))
    for path in page_paths():
        assert fetch(path, keys).status_code == 200, path
    for path in ("/v1/models", "/status", "/page/", "/page/nothing.js", "/page"):
        assert fetch(path, keys).status_code == 401, path


def test_a_host_that_is_not_let_in_gets_no_page() -> None:
    assert fetch("/", headers={"host": "evil.example"}).status_code == 403


@pytest.mark.parametrize("path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page/chat"])
def test_no_path_leads_elsewhere(path: str) -> None:
    assert fetch(path).status_code == 404


def test_the_page_can_be_switched_off() -> None:
    off = ServerConfig(page=False)
    assert fetch("/", off).text == "Ollama is running"  # what its clients expect there
    assert fetch("/page/app.js", off).status_code == 404
    assert fetch("/", ServerConfig(page=False, api_key=("k",))).status_code == 401


def test_the_files_are_no_part_of_the_api() -> None:
    assert not page_paths() & set(fetch("/openapi.json").json()["paths"])


async def _answer(app: Any, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return await client.get(path)


def test_the_page_is_there_before_the_model_is() -> None:
    app = create_waiting_app(ServerConfig(), "the model is being loaded")
    assert asyncio.run(_answer(app, "/")).status_code == 200
    for path in ("/v1/models", "/health"):
        told = asyncio.run(_answer(app, path))
        assert told.status_code == 503
        assert "being loaded" in told.json()["error"]["message"]
        assert told.headers["retry-after"] == "5"
    off = create_waiting_app(ServerConfig(page=False), "the model is being loaded")
    assert asyncio.run(_answer(off, "/")).status_code == 503
