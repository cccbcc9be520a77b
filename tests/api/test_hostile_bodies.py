"""Bodies of hostile sizes, depths and repeats: each is answered below 500, and with few words.

What they cost a real server is measured by `tools/fuzz_bodies.py`, over thousands of larger ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from scripted_engine import ScriptedEngine, answer_anything, serving

from hostile_bodies import hostile_bodies
from pippin.errors import MAX_MESSAGE_CHARS

pytestmark = pytest.mark.slow

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving(ScriptedEngine(answer_anything)) as url, httpx.Client(base_url=url) as client:
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
    normal = client.post("/v1/completions", json={"model": "stories", "prompt": "Once"})
    assert normal.status_code == 200
