"""A worked example: a new field is one row of a table, which checks, reads and describes it.

A field of sampling reaches the engine in every dialect.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from qwen35_server import says, serving_qwen

import pippin
from cases import cases
from pippin.api.dialects.chat_completions import CHAT
from pippin.api.requests.fields import FieldTable, integer_from
from pippin.errors import RequestError
from test_tools import load_tool

USER = {"role": "user", "content": "Hi."}
NEW = {"speculate": False, "min_p": 0.25, "min_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], **NEW},
    "/v1/completions": {"prompt": "Hi.", **NEW},
    "/v1/responses": {"input": "Hi.", **NEW},
    "/v1/messages": {"messages": [USER], "max_tokens": 5, **NEW},
    "/infill": {"input_prefix": "a", "input_suffix": "b", **NEW},
    "/api/chat": {"messages": [USER], "options": NEW},
    "/api/generate": {"prompt": "Hi.", "options": NEW},
}


@cases("path", BODIES)
def test_a_field_of_sampling_is_honoured_in_every_dialect(path: str) -> None:
    with serving_qwen(says("Hello.")) as (url, engine):
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, **BODIES[path]}
        if "options" in body:
            schema = schema["properties"]["options"]["anyOf"][0]
        assert NEW.keys() <= schema["properties"].keys()
        reply = httpx.post(url + path, json=body)
        assert reply.status_code == 200, reply.text
        assert not NEW.keys() & reply.headers.get("x-pippin-ignored", "").split(", ")
        plain = {name: body[name] for name in body.keys() - {*NEW, "options"}}
        assert httpx.post(url + path, json=plain).status_code == 200
    found = [{name: getattr(each.params, name) for name in NEW} for each in engine.submits]
    assert found[0] == NEW
    assert found[1]["speculate"] is True


def test_such_a_field_is_named_in_two_files_before_the_sampler() -> None:
    """And in one that has the checkpoint's advice for it."""
    source = Path(pippin.__file__).parent
    named = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if "backends" not in path.parts and re.search(r"\bmin_p\b", path.read_text())
    }
    assert named == {"api/requests/fields.py", "types.py", "text/bundle.py"}


def test_a_row_is_checked_read_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a field of chats alone needs besides: a row of `CHAT`, and its use in `parse_chat`."""
    tool = load_tool("field_tables")
    table = FieldTable({**CHAT.fields, "patience": integer_from(0, 5)}, required=CHAT.required)
    sent = {"messages": [USER], "patience": 3}
    assert table.read(sent, tool.RULES).get("patience") == 3
    with pytest.raises(RequestError, match="patience is 6; it must be an integer from 0 to 5"):
        table.read({**sent, "patience": 6}, tool.RULES)
    (schema, _) = table.schema(tool.RULES)["properties"]["patience"]["anyOf"]
    assert schema == {"type": "integer", "minimum": 0, "maximum": 5}
    monkeypatch.setitem(tool.TABLES, "chat", table)
    page = tool.rewritten("<!-- fields: chat -->\n")
    assert "| `patience` | an integer from 0 to 5 | |" in page
