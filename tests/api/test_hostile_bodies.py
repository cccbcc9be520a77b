"""Bodies of hostile sizes, depths and repeats: each is answered below 500, and with few words.

What they cost a real server is measured by `tools/fuzz_bodies.py`, over thousands of larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from scripted_engine import ScriptedEngine, answer_anything, serving

from hostile_bodies import hostile_bodies
from pippin.config import ServerConfig
from pippin.errors import MAX_MESSAGE_CHARS
from processes import wait_until

pytestmark = pytest.mark.slow

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    config = ServerConfig(batch_dir=str(tmp_path_factory.mktemp("batches")))
    with (
        serving(ScriptedEngine(answer_anything), config) as url,
        httpx.Client(base_url=url) as client,
    ):
        yield client


@pytest.mark.parametrize("seed", range(8))
def test_hostile_bodies_are_answered(client: httpx.Client, seed: int) -> None:
    document = client.get("/openapi.json").json()
    for hostile in hostile_bodies(
        document, "stories", 60, seed=seed, grammars=True, largest=100_000
    ):
        reply = client.post(hostile.path, content=hostile.body, headers=JSON)
        assert reply.status_code < 500, (hostile.what, reply.text[:300])
        if reply.is_error:
            assert len(reply.content) < 2 * MAX_MESSAGE_CHARS, hostile.what
        if hostile.path == "/v1/files":
            _send_as_a_form(client, hostile.body)
    normal = client.post("/v1/completions", json={"model": "stories", "prompt": "Once"})
    assert normal.status_code == 200


def _send_as_a_form(client: httpx.Client, body: bytes) -> None:
    """As a file whose lines are bad, and as the parts of a form."""
    file = client.post("/v1/files", files={"file": body}, data={"purpose": "batch"})
    assert file.status_code == 200, file.text[:300]
    batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/responses"}
    batch["completion_window"] = "24h"
    made = client.post("/v1/batches", json=batch).json()
    wait_until(lambda: client.get(f"/v1/batches/{made['id']}").json()["status"] == "failed")
    for type in ("multipart/form-data; boundary=a", "multipart/form-data; boundary={"):
        reply = client.post("/v1/files", content=body, headers={"content-type": type})
        assert reply.status_code == 400
