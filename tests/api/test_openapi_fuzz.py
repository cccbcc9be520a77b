"""Requests made up from the OpenAPI document: none is a 500, what it forbids is refused.

They are made up when the test runs: schemathesis's own plugin would do so in every worker, to name
the tests.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from repeated_fields import repeated_fields
from scripted_engine import ScriptedEngine, answer_anything, build_app

from pippin.api.app import ENDPOINTS
from pippin.config import ServerConfig

pytestmark = pytest.mark.slow

# Some bodies have several names of a path, and one endpoint: one of them will do.
TABLES = {row.path: row.body for row in ENDPOINTS if row.body is not None}
BODY_PATHS = {id(table): path for path, table in TABLES.items()}.values()
QUERY_PATHS = [row.path for row in ENDPOINTS if row.method == "GET" and row.query]
# These read what /v1/responses and /v1/messages read, where every field is tried with every kind of
# value: random bodies will do.
COUNTS = ("/v1/responses/input_tokens", "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import schemathesis

    files = str(tmp_path_factory.mktemp("files"))
    any_host = ServerConfig(allowed_host=("*",), batch_dir=files)
    app = build_app(ScriptedEngine(answer_anything), any_host)
    document = schemathesis.openapi.from_asgi("/openapi.json", app)
    for path in TABLES:
        body = document.raw_schema["paths"][path]["post"]["requestBody"]["content"]
        for name in repeated_fields(path):
            del body["application/json"]["schema"]["properties"][name]
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    document.config.generation.update(modes=modes)
    return document


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def check(case: Any) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        negative_data_rejection,
        response_schema_conformance,
    )

    case.call_and_validate(
        session=client(case.operation.app),
        checks=[not_a_server_error, negative_data_rejection, response_schema_conformance],
    )


@cache
def client(app: Any) -> Any:
    """One for all requests, which reads nothing from the environment at each of them."""
    from schemathesis.python.asgi import ASGIClient

    session = ASGIClient(app)
    session.trust_env = False
    return session


@pytest.mark.parametrize("path", dict.fromkeys([*BODY_PATHS, *QUERY_PATHS]))
def test_what_the_document_forbids_is_refused_and_nothing_is_a_500(
    path: str, document: Any
) -> None:
    from schemathesis.pytest.lazy import get_all_tests

    document.config.phases.coverage.enabled = path not in COUNTS
    of_path = document.include(path=path)
    tests = list(get_all_tests(schema=of_path, test_func=check, settings=None, given_kwargs=None))
    assert tests
    for found in tests:
        _, run = found.ok()
        run()
