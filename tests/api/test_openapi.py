"""The OpenAPI document is true: what it forbids is refused, and nothing it allows is a 500."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    response_schema_conformance,
)
from scripted_engine import MODEL, TEXT, ScriptedEngine, serving

from pippin.api.app import create_app
from pippin.api.endpoints.field_schemas import request_schemas
from pippin.config import LimitsConfig, ServerConfig
from pippin.messages import Submit, TokenDelta

USER = {"role": "user", "content": "a"}
BODIES = request_schemas(MODEL, LimitsConfig())


def answer(submit: Submit) -> list[TokenDelta]:
    if submit.embeds:
        return [TokenDelta(submit.id, embedding=b"\0\0\x80?" * 4, finish="stop")]
    return [TokenDelta(submit.id, [5], finish="length")]


def document() -> Any:
    with serving(ScriptedEngine(answer)) as url:
        return httpx.get(f"{url}/openapi.json").json()


def test_every_route_is_described() -> None:
    paths = document()["paths"]
    assert paths["/v1/models/{id}"]["get"]["parameters"][0]["name"] == "id"
    assert BODIES.keys() <= paths.keys()
    for path, schema in BODIES.items():
        content = paths[path]["post"]["requestBody"]["content"]
        assert content == {"application/json": {"schema": schema}}
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", BODIES)
def test_every_field_that_is_honoured_says_what_it_holds(path: str) -> None:
    assert [name for name, schema in BODIES[path]["properties"].items() if not schema] == []


def test_a_server_with_keys_says_so() -> None:
    assert "security" not in document()
    with serving(ScriptedEngine(), ServerConfig(api_key=("secret",))) as url:
        assert httpx.get(f"{url}/openapi.json").status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert httpx.get(f"{url}/openapi.json", headers=headers).json()["security"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"model": "stories", "messages": [USER]},
        ),
        ("/v1/completions", {"model": "gpt-4o", "prompt": [5, 6], "max_tokens": 3, "stop": None}),
        ("/v1/embeddings", {"model": "stories", "input": ["a", "b"], "encoding_format": "base64"}),
        ("/tokenize", {"prompt": "a", "tools": []}),
        ("/detokenize", {"tokens": [[5], [6]]}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2, "stop": ["x"]}}),
    ],
)
def test_real_requests_are_allowed_and_answered(path: str, body: dict[str, Any]) -> None:
    jsonschema.validate(body, BODIES[path])
    with serving(ScriptedEngine(answer)) as url:
        assert httpx.post(url + path, json=body).status_code == 200
        wrong = body | {"nonsense": 1}
        assert httpx.post(url + path, json=wrong).status_code == 400
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, BODIES[path])


APP = create_app(
    ScriptedEngine(answer), TEXT, ServerConfig(allowed_host=("*",)), MODEL, LimitsConfig()
)
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
SCHEMA.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@pytest.mark.slow
@SCHEMA.include(path=list(BODIES)).parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_document_forbids_is_refused_and_nothing_is_a_500(case: schemathesis.Case) -> None:
    case.call_and_validate(
        checks=[not_a_server_error, negative_data_rejection, response_schema_conformance]
    )
