"""`speculate` in every dialect that generates."""

from __future__ import annotations

from typing import Any

import httpx
from qwen35_server import says, serving_qwen

from cases import cases

USER = {"role": "user", "content": "Hi."}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "qwen", "messages": [USER], "speculate": False},
    "/v1/completions": {"model": "qwen", "prompt": "Hi.", "speculate": False},
    "/v1/responses": {"model": "qwen", "input": "Hi.", "speculate": False},
    "/v1/messages": {"model": "qwen", "messages": [USER], "max_tokens": 5, "speculate": False},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "speculate": False},
    "/api/chat": {"model": "qwen", "messages": [USER], "options": {"speculate": False}},
    "/api/generate": {"model": "qwen", "prompt": "Hi.", "options": {"speculate": False}},
}


@cases("path", BODIES)
def test_a_request_without_drafts_in_every_dialect(path: str) -> None:
    with serving_qwen(says("Hello.")) as (url, engine):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {name: model if name == "model" else value for name, value in BODIES[path].items()}
        reply = httpx.post(url + path, json=body)
        assert reply.status_code == 200, reply.text
        assert "speculate" not in reply.headers.get("x-pippin-ignored", "")
        plain = {name: body[name] for name in body.keys() - {"speculate", "options"}}
        assert httpx.post(url + path, json=plain).status_code == 200
    assert [submit.params.speculate for submit in engine.submits] == [False, True]
