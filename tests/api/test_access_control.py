"""Who is let in: hosts, origins, content types and keys, over real HTTP."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, answer_anything, build_app, say, serving
from starlette.datastructures import Headers

from cases import cases
from pippin.api.app import ENDPOINTS
from pippin.api.http.access_control import AccessControl, read_key_file, warn_if_open
from pippin.config import Config, ServerConfig
from pippin.errors import ConfigError, LoadError, PippinError
from pippin.startup.resolve import resolve

CHAT = {"model": "stories", "messages": [{"role": "user", "content": "Hi."}]}
EVIL = "https://evil.example"


def status(config: ServerConfig, method: str, path: str, **options: Any) -> int:
    with serving(ScriptedEngine(say("Hi.")), config) as url:
        return httpx.request(method, url + path, **options).status_code


def chat_status(config: ServerConfig, **headers: str) -> int:
    return status(config, "POST", "/v1/chat/completions", json=CHAT, headers=headers)


def lets_in(host: str | None, *allowed: str, bound: str = "127.0.0.1") -> bool:
    config = ServerConfig(host=bound, allowed_host=allowed)
    try:
        AccessControl(build_app(ScriptedEngine()), config).check_host(
            Headers({} if host is None else {"host": host})
        )
    except PippinError:
        return False
    return True


@cases(
    "host",
    [
        *("127.0.0.1:8000", "localhost", "LocalHost:1", "[::1]:8000", "192.168.1.7", None),
        *("host.docker.internal:8000", "Host.Containers.Internal"),
    ],
)
def test_addresses_and_localhost_are_answered_to(host: str | None) -> None:
    assert lets_in(host)


@cases(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("", "[", "[::1", "a b", "user@localhost.evil", "internal", "a.internal.evil.example"),
    ],
)
def test_other_names_are_not(host: str) -> None:
    assert not lets_in(host)


def test_names_can_be_let_in() -> None:
    assert lets_in("chat.example.com", "chat.example.com")
    assert lets_in("chat.example.com", "*.example.com")
    assert not lets_in("example.com.evil", "*.example.com")
    assert not lets_in("notexample.com", "*.example.com")
    assert lets_in("anything", "*")
    assert lets_in("gpu-box:80", bound="gpu-box")


def test_a_server_on_all_addresses_answers_to_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Workshop")
    assert lets_in("workshop:8000", bound="0.0.0.0")
    assert lets_in("workshop.local", bound="::")
    assert not lets_in("workshop", bound="127.0.0.1")
    assert not lets_in("evil.example", bound="0.0.0.0")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/flush_cache", "/v1/nothing"])
def test_a_rebound_name_reaches_nothing(path: str) -> None:
    with serving(engine := ScriptedEngine(say("Hi."))) as url:
        reply = httpx.post(url + path, json=CHAT, headers={"host": "evil.example"})
    assert reply.status_code == 403
    assert "--allowed-host" in reply.json()["error"]["message"]
    assert not engine.submits


@cases(
    "origin",
    [
        *(EVIL, "null", "file://", "http://localhost.evil.example", "http://127.evil.example"),
        *("http://evil.example/http://localhost", "http://localhost:1.evil.example", "localhost"),
        *("http://127.0.0.1@evil.example", "ftp://localhost", "http://192.168.1.7", "http://[::2]"),
    ],
)
def test_a_page_of_another_site_reaches_nothing(origin: str) -> None:
    engine = ScriptedEngine(say("Hi."))
    with serving(engine) as url:
        for method, path in (("POST", "/v1/chat/completions"), ("POST", "/flush_cache")):
            reply = httpx.request(method, url + path, json=CHAT, headers={"origin": origin})
            assert reply.status_code == 403
            assert "--cors-origin" in reply.json()["error"]["message"]
            assert "access-control-allow-origin" not in reply.headers
        headers = {"origin": origin, "access-control-request-method": "POST"}
        refused = httpx.options(f"{url}/v1/chat/completions", headers=headers)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
    assert not engine.submits


def test_a_page_of_this_server_may_use_it() -> None:
    with serving(ScriptedEngine(say("Hi."))) as url:
        assert httpx.get(f"{url}/v1/models", headers={"origin": url}).status_code == 200


LOCAL = "http://localhost:3000"
ADMIN_PATHS = (
    *(("POST", "/flush_cache"), ("GET", "/status"), ("GET", "/metrics"), ("GET", "/events")),
    *(("GET", "/events/node/1"), ("GET", "/v1/responses/resp_1"), ("GET", "/openapi.json")),
    *(("DELETE", "/v1/responses/resp_1"), ("GET", "/v1/responses/resp_1/input_items")),
    *(("POST", "/api/pull"), ("DELETE", "/api/delete"), ("GET", "/v1/files"), ("GET", "/page/a")),
)


def asking_as(origin: str, url: str, method: str, path: str) -> httpx.Response:
    headers = {"origin": origin, "access-control-request-method": method}
    return httpx.options(url + path, headers=headers)


@pytest.mark.parametrize(
    "origin", [LOCAL, "https://localhost", "http://127.0.0.1:8080", "http://[::1]:1"]
)
def test_pages_of_this_machine_may_generate_and_read_the_reply(origin: str) -> None:
    with serving(ScriptedEngine(say("Hi."))) as url:
        for site in ("same-site", "cross-site"):
            headers = {"origin": origin, "sec-fetch-site": site}
            reply = httpx.post(f"{url}/v1/chat/completions", json=CHAT, headers=headers)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == origin
        for path in ("/v1/chat/completions", "/chat/completions", "/api/chat", "/v1/messages"):
            assert asking_as(origin, url, "POST", path).status_code == 200
        for path in ("/v1/models", "/v1/models/stories", "/models", "/api/tags"):
            reply = httpx.get(url + path, headers={"origin": origin})
            assert reply.headers["access-control-allow-origin"] == origin


@cases(("method", "path"), ADMIN_PATHS)
@cases("config", [ServerConfig(), ServerConfig(api_key=("k",))])
def test_pages_of_this_machine_reach_nothing_that_concerns_others(
    config: ServerConfig, method: str, path: str
) -> None:
    """With a key too: that such a page has one does not make it an admin's."""
    with serving(ScriptedEngine(say("Hi.")), config) as url:
        for key in ({}, {"authorization": "Bearer k"}):
            reply = httpx.request(method, url + path, headers={"origin": LOCAL, **key})
            assert reply.status_code == 403
            assert "--cors-origin" in reply.text
            assert "access-control-allow-origin" not in reply.headers
        refused = asking_as(LOCAL, url, method, path)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


def test_every_path_is_closed_to_pages_of_this_machine_unless_it_is_listed() -> None:
    local = {row.path.replace(":path", "") for row in ENDPOINTS if row.is_local}
    with serving(ScriptedEngine(answer_anything)) as url:
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
        for path, methods in paths.items():
            known = path.format(id=1) if "{id}" in path else path
            for method in methods:
                reply = httpx.request(method, url + known, headers={"origin": LOCAL})
                assert (reply.status_code == 403) != (path in local), path
    assert paths.keys() >= local


def test_a_page_of_this_machine_needs_the_key_too() -> None:
    config = ServerConfig(api_key=("k",))
    assert chat_status(config, origin=LOCAL) == 401
    assert chat_status(config, origin=LOCAL, authorization="Bearer k") == 200


def test_a_page_of_this_machine_may_do_all_if_it_is_named() -> None:
    config = ServerConfig(cors_origin=(LOCAL,))
    assert status(config, "GET", "/status", headers={"origin": LOCAL}) == 200
    assert status(config, "GET", "/status", headers={"origin": "http://localhost:1"}) == 403


def test_a_rebound_name_is_refused_whatever_its_origin() -> None:
    headers = {"host": "evil.example", "origin": LOCAL}
    assert status(ServerConfig(), "GET", "/v1/models", headers=headers) == 403


def test_programs_are_named_by_their_scheme() -> None:
    config = ServerConfig(cors_origin=("chrome-extension://*", "app://*"))
    for origin, expected in (
        ("chrome-extension://abcdef", 200),
        ("app://obsidian.md", 200),
        ("tauri://localhost", 403),
        (EVIL, 403),
    ):
        assert chat_status(config, origin=origin) == expected
    for wrong in ("https://*", "http://*", "app://a*"):
        with pytest.raises(ConfigError, match="cors_origin"):
            ServerConfig(cors_origin=(wrong,))


def test_a_key_is_enough_where_the_name_is_unknown() -> None:
    config = ServerConfig(api_key=("k",))
    assert chat_status(config, host="pippin.example", authorization="Bearer k") == 200
    assert chat_status(config, host="pippin.example", authorization="Bearer x") == 403
    assert chat_status(config, host="pippin.example") == 403


def test_a_site_that_was_named_may_ask_and_read() -> None:
    config = ServerConfig(cors_origin=("https://chat.example",), api_key=("k",))
    with serving(ScriptedEngine(say("Hi.")), config) as url:
        path = f"{url}/v1/chat/completions"
        asks = {
            "origin": "https://chat.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        allowed = httpx.options(path, headers=asks)  # browsers ask without the key
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        headers = {"origin": "https://chat.example", "authorization": "Bearer k"}
        reply = httpx.post(path, json=CHAT, headers=headers)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://chat.example"
        refused = httpx.post(path, json=CHAT, headers={"origin": "https://chat.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.example"
        assert httpx.options(path, headers={**asks, "origin": EVIL}).status_code == 400
        assert httpx.post(path, json=CHAT, headers={**headers, "origin": EVIL}).status_code == 403


@pytest.mark.parametrize(
    "sign",
    [
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-mode": "no-cors"},
        {"referer": "https://evil.example/"},
        {"cookie": "a=b"},
        {"user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:60.0) Gecko/20100101 Firefox/60.0"},
    ],
)
def test_a_browser_sends_json_as_json(sign: dict[str, str]) -> None:
    for given in ("application/json", "Application/JSON; charset=utf-8"):
        assert chat_status(ServerConfig(), **sign, **{"content-type": given}) == 200
    for given in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert chat_status(ServerConfig(), **sign, **{"content-type": given}) == 415


@pytest.mark.parametrize("given", ["", "application/x-www-form-urlencoded", "text/plain"])
def test_a_programs_body_is_json_whatever_it_says(given: str) -> None:
    """`curl -d`, and clients of Ollama's API, whose server does not look at the type."""
    assert chat_status(ServerConfig(), **{"content-type": given}) == 200
    with serving(ScriptedEngine(say("Hi."))) as url:
        no_type = httpx.post(f"{url}/api/chat", content=json.dumps(CHAT))
        assert "content-type" not in no_type.request.headers
        assert no_type.status_code == 200
        assert httpx.post(f"{url}/api/chat", content="a=b").status_code == 400


KEYS = ServerConfig(api_key=("sésame", "open"))


@cases(
    ("header", "expected"),
    [
        (None, 401),
        ("Bearer sesame", 401),
        ("Bearer", 401),
        ("Basic open", 401),
        ("open", 401),
        ("Bearer sésame", 200),
        ("Bearer open", 200),
        ("bearer open", 200),
        ("BEARER  open", 200),
    ],
)
def test_one_of_the_keys_is_needed(header: str | None, expected: int) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    for path in ("/v1/models", "/status"):
        assert status(KEYS, "GET", path, headers=headers) == expected
    for path in ("/health", "/ready"):
        assert status(KEYS, "GET", path, headers=headers) == 200


def test_keys_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert "open" not in repr(KEYS)
    assert status(KEYS, "GET", "/v1/models", headers={"authorization": "Bearer open"}) == 200
    assert status(KEYS, "GET", "/v1/models", headers={"authorization": "Bearer opener"}) == 401
    assert caplog.records
    assert "open" not in caplog.text.replace("connection open", "")


def test_keys_come_from_a_file_too(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n\n  second \n")
    server = ServerConfig(api_key=("given",), api_key_file=str(path))
    assert resolve(Config(server=server)).server.api_key == ("given", "first", "second")


def test_a_file_without_keys_is_an_error(tmp_path: Any) -> None:
    path = tmp_path / "keys"
    with pytest.raises(LoadError, match="cannot read the file of keys"):
        read_key_file(str(path))
    path.write_text("\n# none\n")
    with pytest.raises(LoadError, match="is empty: write one key per line"):
        read_key_file(str(path))


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_an_error(key: str) -> None:
    with pytest.raises(ValueError, match="api_key is empty"):
        ServerConfig(api_key=("good", key))


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("0.0.0.0", (), True),
        ("192.168.1.7", (), True),
        ("::", (), True),
        ("0.0.0.0", ("k",), False),
        ("127.0.0.1", (), False),
        ("::1", (), False),
        ("localhost", (), False),
    ],
)
def test_an_open_server_is_warned_about(
    caplog: pytest.LogCaptureFixture, host: str, keys: tuple[str, ...], warns: bool
) -> None:
    warn_if_open(ServerConfig(host=host, api_key=keys))
    assert ("without an API key" in caplog.text) == warns


def fetched(site: str, mode: str = "no-cors", dest: str = "empty", **more: str) -> dict[str, str]:
    """What a browser says of where a request is from, beside or in place of an Origin."""
    return {"sec-fetch-site": site, "sec-fetch-mode": mode, "sec-fetch-dest": dest, **more}


ROUTES = [
    *(("GET", path) for path in ("/status", "/events", "/v1/models", "/metrics", "/health")),
    *(("POST", path) for path in ("/flush_cache", "/v1/chat/completions")),
    *(("GET", path) for path in ("/page/app.js", "/openapi.json", "/events/node/1")),
]


@cases(("method", "path"), ROUTES)
@cases("site", ["cross-site", "same-site", "something new"])
def test_a_request_that_another_sites_page_makes_without_an_origin_is_refused(
    method: str, path: str, site: str
) -> None:
    engine = ScriptedEngine(say("Hi."))
    with serving(engine) as url:
        for headers in (
            fetched(site),
            fetched(site, "navigate", "document"),  # a link to it, or a form
            fetched(site, "navigate", "iframe"),
        ):
            reply = httpx.request(method, url + path, json=CHAT, headers=headers)
            assert reply.status_code == 403
            assert "--cors-origin" in reply.json()["error"]["message"]
    assert not engine.submits


def test_a_link_on_another_site_may_lead_to_the_page() -> None:
    link = fetched("cross-site", "navigate", "document")
    assert status(ServerConfig(), "GET", "/", headers=link) == 200
    for wrong in (
        fetched("cross-site", "navigate", "iframe"),
        fetched("cross-site", "no-cors", "document"),
        fetched("cross-site"),
    ):
        assert status(ServerConfig(), "GET", "/", headers=wrong) == 403
    assert status(ServerConfig(), "POST", "/", headers=link) == 403


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_page_itself_and_addresses_typed_by_hand_pass(site: str) -> None:
    assert status(ServerConfig(), "GET", "/v1/models", headers=fetched(site, "cors")) == 200


def test_requests_of_a_site_that_was_named_pass_with_their_origin() -> None:
    config = ServerConfig(cors_origin=("https://chat.example",))
    for site in ("cross-site", "same-site"):
        headers = fetched(site, "cors")
        named = {**headers, "origin": "https://chat.example"}
        assert status(config, "GET", "/v1/models", headers=named) == 200
        assert status(config, "GET", "/v1/models", headers=headers) == 403
        assert status(config, "GET", "/v1/models", headers={**headers, "origin": EVIL}) == 403
    anyone = ServerConfig(cors_origin=("*",))
    assert status(anyone, "GET", "/v1/models", headers=fetched("cross-site")) == 200
