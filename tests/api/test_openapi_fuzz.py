"""Requests made up from the OpenAPI document: none is a 500, what it forbids is refused."""

from __future__ import annotations

import atexit
import shutil
import tempfile

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    negative_data_rejection,
    response_schema_conformance,
)
from scripted_engine import MODEL, TEXT, ScriptedEngine, answer_anything

from pippin.api.app import create_app
from pippin.api.endpoints import openapi
from pippin.config import LimitsConfig, ServerConfig

pytestmark = pytest.mark.slow

FILES = tempfile.mkdtemp()
atexit.register(shutil.rmtree, FILES)
ANY_HOST = ServerConfig(allowed_host=("*",), batch_dir=FILES)
APP = create_app(ScriptedEngine(answer_anything), TEXT, ANY_HOST, MODEL, LimitsConfig())
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)
SCHEMA.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@SCHEMA.include(path=[*openapi.BODIES, *openapi.QUERIES]).parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_the_document_forbids_is_refused_and_nothing_is_a_500(case: schemathesis.Case) -> None:
    case.call_and_validate(
        checks=[not_a_server_error, negative_data_rejection, response_schema_conformance]
    )
