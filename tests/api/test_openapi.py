"""The OpenAPI document is true: what it forbids is refused, and real requests are allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from scripted_engine import MODEL, TEXT, ScriptedEngine, answer_anything, serving

from cases import cases
from pippin.api.app import ENDPOINTS
from pippin.api.batches.store import Database, OwnerStore
from pippin.api.model_info import RequestRules
from pippin.config import LimitsConfig, ServerConfig
from pippin.text.bundle import FillInMiddle

USER = {"role": "user", "content": "a"}
RULES = RequestRules(MODEL, TEXT.defaults, LimitsConfig())
TABLES = {row.path: row.body for row in ENDPOINTS if row.body is not None}
BODIES = {path: table.schema(RULES) for path, table in TABLES.items()}
DOCUMENTS = {path: jsonschema.Draft202012Validator(schema) for path, schema in BODIES.items()}
# Some bodies have the same fields, and one code that reads them: one of their paths will do.
FIELDS_PATHS = {id(t.fields): path for path, t in reversed(TABLES.items())}.values()


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    """Of a server that has the file of `REAL`."""
    database = Database(tmp_path)
    files = OwnerStore(database, "", max_bytes=1, max_file_bytes=1)
    files.add_file("file-1", "a", "batch", None, nbytes=1)
    files.path("file-1").write_bytes(b"a")
    database.close()
    return ServerConfig(batch_dir=str(tmp_path))


def document() -> Any:
    with serving(ScriptedEngine(answer_anything)) as url:
        return httpx.get(f"{url}/openapi.json").json()


def test_every_route_is_described() -> None:
    paths = document()["paths"]
    assert paths["/v1/models/{id}"]["get"]["parameters"][0]["name"] == "id"
    assert BODIES.keys() <= paths.keys()
    assert list(paths["/events"]["get"]["responses"]["200"]["content"]) == ["text/event-stream"]
    assert paths["/events/node/{id}"]["get"]["parameters"][0]["schema"]["type"] == "integer"
    assert paths["/v1/responses/{id}"].keys() == {"get", "delete"}
    for row in ENDPOINTS:
        if row.query is not None:
            found = paths[row.path][row.method.lower()].get("parameters", [])
            names = [parameter["name"] for parameter in found if parameter["in"] == "query"]
            assert names == list(row.query.fields)
    form = paths["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["purpose", "file"]
    for path, schema in BODIES.items():
        content = paths[path]["post"]["requestBody"]["content"]
        assert content == {"application/json": {"schema": schema}}
        jsonschema.Draft202012Validator.check_schema(schema)


@cases("path", BODIES)
def test_every_field_that_is_honoured_says_what_it_holds(path: str) -> None:
    assert [name for name, schema in BODIES[path]["properties"].items() if not schema] == []


def test_a_server_with_keys_says_so() -> None:
    assert "security" not in document()
    with serving(ScriptedEngine(), ServerConfig(api_key=("secret",))) as url:
        assert httpx.get(f"{url}/openapi.json").status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{url}/openapi.json", headers=headers).json()["security"]


FILLS = replace(TEXT, fill_in_middle=FillInMiddle(5, 6, 7, stop_ids=()))
RANKED = {"query": "a", "documents": ["b"], "top_n": 1}
SCORED = {"text_1": "a", "text_2": ["b", "c"]}
REAL: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "stories", "input": "a", "store": True, "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": "a", "instructions": "b"},
    "/v1/messages": {"model": "stories", "messages": [USER], "max_tokens": 3, "system": "b"},
    "/v1/messages/count_tokens": {"model": "stories", "messages": [USER]},
    "/v1/chat/completions": {"model": "stories", "messages": [USER], "logprobs": True},
    "/v1/completions": {"model": "gpt-4o", "prompt": [5, 6], "max_tokens": 3, "echo": True},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}]},
    "/v1/embeddings": {"model": "stories", "input": ["a", "b"], "encoding_format": "base64"},
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), RANKED),
    **dict.fromkeys(("/v1/score", "/score"), SCORED),
    "/api/chat": {"model": "stories", "messages": [USER], "stream": False, "logprobs": True},
    "/api/generate": {"model": "gpt-4o", "prompt": "a", "stream": False, "logprobs": True},
    "/api/embed": {"model": "stories:latest", "input": ["a", "b"]},
    "/api/embeddings": {"model": "stories", "prompt": "a"},
    "/api/show": {"model": "stories"},
    "/api/pull": {"model": "stories:latest", "stream": False, "insecure": True},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/responses",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    },
    "/tokenize": {"prompt": "a", "tools": []},
    "/detokenize": {"tokens": [[5], [6]]},
}


@pytest.mark.parametrize(("path", "body"), REAL.items())
def test_real_requests_are_allowed_and_answered(
    path: str, body: dict[str, Any], config: ServerConfig
) -> None:
    DOCUMENTS[path].validate(body)
    with serving(ScriptedEngine(answer_anything), config, text=FILLS) as url:
        assert httpx.post(url + path, json=body).status_code == 200
        other = body | {"nonsense": 1}
        reply = httpx.post(url + path, json=other)
    if BODIES[path].get("additionalProperties") == {}:  # as Ollama has it
        assert (reply.status_code, reply.headers["x-pippin-ignored"]) == (200, "nonsense")
        DOCUMENTS[path].validate(other)
    else:
        assert reply.status_code == 400
        with pytest.raises(jsonschema.ValidationError):
            DOCUMENTS[path].validate(other)
