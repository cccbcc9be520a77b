"""What separates the owners of API keys, and requests with a salt of their own."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say, serving

from pippin.config import ServerConfig
from pippin.messages import Submit

SECRET = "a salt that nobody may read"
CHAT = {"model": "stories", "messages": [{"role": "user", "content": "Hi."}]}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "stories", "prompt": "Hi."},
    "/v1/responses": {"model": "stories", "input": "Hi."},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/generate": {"text": "Hi.", "sampling_params": {"max_new_tokens": 5}},
    "/v1/embeddings": {"model": "stories", "input": "Hi."},
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


@pytest.mark.parametrize("path", REQUESTS)
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


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(
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


@pytest.mark.parametrize("path", REQUESTS)
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
