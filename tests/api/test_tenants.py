"""What separates the owners of API keys, and requests with a salt of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say, serving

from cases import cases
from pippin.config import Config, ServerConfig
from pippin.errors import ConfigError
from pippin.messages import Submit
from pippin.startup.resolve import resolve

SECRET = "a salt that nobody may read"
CHAT = {"model": "stories", "messages": [{"role": "user", "content": "Hi."}]}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "stories", "prompt": "Hi."},
    "/v1/responses": {"model": "stories", "input": "Hi."},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/embeddings": {"model": "stories", "input": "Hi."},
    "/api/chat": CHAT,
    "/api/generate": {"model": "stories", "prompt": "Hi."},
    "/api/embed": {"model": "stories", "input": "Hi."},
    "/api/embeddings": {"model": "stories", "prompt": "Hi."},
}
TWO_KEYS = ServerConfig(api_key=("keyA", "keyB"))


def submitted(
    path: str, config: ServerConfig | None = None, key: str = "", **fields: Any
) -> Submit:
    """What the engine gets of a request."""
    engine = ScriptedEngine(say("Hello."))
    with serving(engine, config or ServerConfig()) as url:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        httpx.post(url + path, json={**REQUESTS[path], **fields}, headers=headers)
    (submit,) = engine.submits
    return submit


@cases("path", REQUESTS)
def test_every_dialect_separates_by_cache_salt_and_the_engine_gets_a_digest(path: str) -> None:
    plain, salted, same, other = (
        submitted(path, **fields)
        for fields in (
            {},
            {"cache_salt": SECRET},
            {"cache_salt": SECRET},
            {"cache_salt": SECRET + "!"},
        )
    )
    assert plain.salt == b""
    assert salted.salt == same.salt
    assert len({plain.salt, salted.salt, other.salt}) == 3
    assert len(salted.salt) == len(other.salt) == 32
    assert SECRET not in repr(salted)


@cases("path", REQUESTS)
@cases(
    ("salt", "message"),
    [
        ("", "cache_salt has 0 characters; it must have 1 to 1,024"),
        ("x" * 1_025, "cache_salt has 1,025 characters; it must have 1 to 1,024"),
        (7, "cache_salt is 7; it must be a string"),
    ],
)
def test_a_salt_is_a_string_of_bounded_length(path: str, salt: object, message: str) -> None:
    engine = ScriptedEngine(say("Hello."))
    with serving(engine) as url:
        reply = httpx.post(url + path, json={**REQUESTS[path], "cache_salt": salt})
    assert reply.status_code == 400
    assert message in reply.text
    assert not engine.submits


@cases("path", REQUESTS)
def test_with_several_keys_each_has_prefixes_of_its_own(path: str) -> None:
    of_a, of_b = submitted(path, TWO_KEYS, "keyA"), submitted(path, TWO_KEYS, "keyB")
    assert len({of_a.salt, of_b.salt, b""}) == 3
    assert of_a.salt == submitted(path, TWO_KEYS, "keyA").salt
    both = submitted(path, TWO_KEYS, "keyA", cache_salt=SECRET)
    assert both.salt not in (of_a.salt, submitted(path, cache_salt=SECRET).salt)
    assert both.salt != submitted(path, TWO_KEYS, "keyB", cache_salt=SECRET).salt


def test_one_key_or_none_shares_and_several_share_if_they_are_to() -> None:
    path = "/v1/chat/completions"
    assert submitted(path, ServerConfig(api_key=("keyA",)), "keyA").salt == b""
    assert submitted(path, ServerConfig(api_key=("keyA", "keyA")), "keyA").salt == b""
    shared = ServerConfig(api_key=("keyA", "keyB"), share_prefixes=True)
    assert submitted(path, shared, "keyA").salt == b""
    salted = submitted(path, shared, "keyA", cache_salt=SECRET)
    assert salted.salt == submitted(path, shared, "keyB", cache_salt=SECRET).salt != b""


# ---- stored responses ------------------------------------------------------------------------


def respond(url: str, key: str, *items: dict[str, Any]) -> httpx.Response:
    body = {"model": "stories", "input": list(items)}
    return httpx.post(f"{url}/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})


def test_another_key_cannot_break_a_reference_to_a_stored_item() -> None:
    mine = {"id": "msg_shared", "role": "user", "content": "Of A."}
    refers = {"type": "item_reference", "id": "msg_shared"}
    engine = ScriptedEngine(say("Hello."))
    with serving(engine, TWO_KEYS) as url:
        assert respond(url, "keyA", mine).status_code == 200
        assert respond(url, "keyB", refers).status_code == 400
        assert respond(url, "keyB", {**mine, "content": "Of B."}).status_code == 200
        assert respond(url, "keyA", refers).status_code == 200
        assert engine.submits[-1].token_ids == engine.submits[0].token_ids
        assert respond(url, "keyB", refers).status_code == 200
        assert engine.submits[-1].token_ids == engine.submits[1].token_ids


def test_another_key_cannot_evict_what_is_stored() -> None:
    config = ServerConfig(api_key=("keyA", "keyB"), stored_responses=4)
    with serving(ScriptedEngine(say("Hello.")), config) as url:
        item = {"role": "user", "content": "Hi."}
        stored = respond(url, "keyA", item).json()["id"]
        ids = [respond(url, "keyB", item).json()["id"] for _ in range(5)]

        def read(key: str, id: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.get(f"{url}/v1/responses/{id}", headers=headers).status_code

        assert read("keyA", stored) == 200
        assert [read("keyB", id) for id in ids] == [404, 404, 404, 200, 200]
        assert read("keyB", stored) == 404


# ---- admin routes ----------------------------------------------------------------------------

ADMIN_ROUTES = [
    ("POST", "/flush_cache"),
    ("POST", "/restart_replicas"),
    ("GET", "/events"),
    ("GET", "/events/node/1"),
]
WITH_ADMIN = ServerConfig(api_key=("keyA", "keyB"), admin_key=("root",), show_prompts="on")


def asked(config: ServerConfig, method: str, path: str, key: str = "") -> httpx.Response:
    engine = ScriptedEngine(say("Hello."))
    engine.nodes[1] = {"start": 0, "num_tokens": 1, "tokens": [5]}
    engine.state = {"cache": {"recent_paths": [{"first_tokens": [5], "last_tokens": [6]}]}}
    with serving(engine, config) as url:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.request(method, url + path, headers=headers)


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_with_several_keys_admin_routes_need_the_admin_key(method: str, path: str) -> None:
    for key in ("keyA", "keyB"):
        refused = asked(WITH_ADMIN, method, path, key)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "admin_key_required"
        assert "--admin-key" in refused.json()["error"]["message"]
    assert asked(WITH_ADMIN, method, path).status_code == 401
    assert asked(WITH_ADMIN, method, path, "root").is_success


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_several_keys_without_an_admin_key_say_what_to_set(method: str, path: str) -> None:
    refused = asked(TWO_KEYS, method, path, "keyA")
    assert refused.status_code == 403
    for way in ("--admin-key", "--admin-key-file", "PIPPIN_ADMIN_KEY"):
        assert way in refused.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_the_only_key_is_the_admins_and_without_keys_all_routes_are_open(
    method: str, path: str
) -> None:
    assert asked(ServerConfig(api_key=("keyA",)), method, path, "keyA").is_success
    assert asked(ServerConfig(), method, path).is_success


def test_an_admin_key_takes_that_from_the_only_api_key() -> None:
    config = ServerConfig(api_key=("keyA",), admin_key=("root",))
    assert asked(config, "POST", "/flush_cache", "keyA").status_code == 403
    assert asked(config, "POST", "/flush_cache", "root").status_code == 200


def test_the_admin_key_may_send_prompts_and_has_prefixes_of_its_own() -> None:
    path = "/v1/chat/completions"
    salts = {submitted(path, WITH_ADMIN, key).salt for key in ("keyA", "keyB", "root")}
    assert len(salts) == 3
    assert b"" not in salts


def test_status_shows_paths_of_the_tree_to_admins_alone() -> None:
    assert "recent_paths" in asked(WITH_ADMIN, "GET", "/status", "root").json()["cache"]
    for config in (WITH_ADMIN, TWO_KEYS):
        shown = asked(config, "GET", "/status", "keyA")
        assert shown.status_code == 200
        assert "recent_paths" not in shown.json()["cache"]
    assert (
        "recent_paths" in asked(ServerConfig(api_key=("k",)), "GET", "/status", "k").json()["cache"]
    )


@pytest.mark.parametrize("fields", [{"admin_key": ("",), "api_key": ("k",)}, {"admin_key": ("k",)}])
def test_an_admin_key_is_not_empty_and_goes_with_an_api_key(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="admin_key"):
        ServerConfig(**fields)


def test_admin_keys_come_from_a_file_too_and_are_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "admins"
    path.write_text("# ours\nchief\n")
    server = ServerConfig(api_key=("k",), admin_key=("boss",), admin_key_file=str(path))
    resolved = resolve(Config(server=server)).server
    assert resolved.admin_key == ("boss", "chief")
    assert "chief" not in repr(resolved)
    assert "boss" not in repr(resolved)
