"""Hostile grammars in every dialect, against a server of the bundled model.

Each is a 400 or a reply, and the engine that was there at first is there at last.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from hostile_grammars import FAMILIES
from pippin.types import GrammarSpec
from processes import Served
from soak import REQUEST_SECONDS, serving

MODEL = "stories-hybrid-20m"


def bodies(spec: GrammarSpec) -> list[tuple[str, dict[str, Any]]]:
    """A grammar in each dialect that has a place for it."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    found = [
        (
            "/v1/completions",
            {"model": MODEL, "prompt": "Hi", "max_tokens": 2, spec.kind: spec.text},
        ),
        ("/v1/chat/completions", chat | {spec.kind: spec.text}),
    ]
    if spec.kind != "json_schema":
        syntax = "regex" if spec.kind == "regex" else "lark"
        grammar = {"syntax": syntax, "definition": spec.text}
        format = {"type": "grammar", "grammar": grammar}
        tool = {"type": "custom", "custom": {"name": "t", "format": format}}
        found.append(("/v1/chat/completions", chat | {"tools": [tool]}))
        flat = {"type": "custom", "name": "t", "format": {"type": "grammar", **grammar}}
        found.append(("/v1/responses", {"model": MODEL, "input": "Hi", "tools": [flat]}))
        return found
    try:
        schema = json.loads(spec.text)
    except RecursionError:
        return found
    described = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    found.append(("/v1/chat/completions", chat | {"response_format": described}))
    function = {"name": "f", "parameters": schema, "strict": True}
    tool = {"type": "function", "function": function}
    found.append(("/v1/chat/completions", chat | {"tools": [tool]}))
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    found.append(("/v1/responses", {"model": MODEL, "input": "Hi", "text": text}))
    messages = {"model": MODEL, "messages": chat["messages"], "max_tokens": 2}
    found.append(("/v1/messages", messages | {"tools": [{"name": "f", "input_schema": schema}]}))
    return found


async def attack(server: Served) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=REQUEST_SECONDS) as client:
        before = server.engine_pid
        for name, (family, large, _) in FAMILIES.items():
            for path, body in bodies(family(large)):
                answer = await client.post(path, json=body)
                assert answer.status_code == 400 or "input_schema" in str(body), (name, path)
                assert answer.status_code < 500, (name, path, answer.text)
        # What passes the check of its size and is too much for a compiler all the same.
        for spec in (family(large // 2) for family, large, _ in FAMILIES.values()):
            answer = await client.post(*bodies(spec)[0][:1], json=bodies(spec)[0][1])
            assert answer.status_code in (200, 400), answer.text
        assert (await client.get("/health")).status_code == 200
        assert server.engine_pid == before


@pytest.mark.slow
def test_no_grammar_in_any_dialect_ends_an_engine_or_the_server() -> None:
    with serving() as server:
        asyncio.run(attack(server))
