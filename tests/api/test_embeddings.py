"""`/v1/embeddings`, asked by the official client and by hand."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types import embedding_create_params
from scripted_engine import MODEL, TOKENIZER, Script, ScriptedEngine, fail, hang, serving

from cases import cases
from pippin.api.endpoints.embeddings import EMBEDDINGS
from pippin.messages import Submit, TokenDelta


def vector_of(tokens: list[int]) -> np.ndarray:
    return np.array([len(tokens), tokens[0], tokens[-1], 1.0], dtype=np.float32)


def embed(submit: Submit) -> list[TokenDelta]:
    assert submit.embeds
    return [
        TokenDelta(
            submit.id,
            embedding=vector_of(submit.token_ids).tobytes(),
            finish="stop",
        )
    ]


def unit(tokens: list[int]) -> np.ndarray:
    return vector_of(tokens) / np.linalg.norm(vector_of(tokens))


def post(*scripts: Script, **fields: Any) -> httpx.Response:
    with serving(ScriptedEngine(*(scripts or (embed,)))) as url:
        return httpx.post(f"{url}/v1/embeddings", json={"model": "stories"} | fields)


def test_every_documented_field_is_honoured() -> None:
    documented = embedding_create_params.EmbeddingCreateParams.__annotations__
    assert documented.keys() <= EMBEDDINGS.fields.keys()


@pytest.mark.parametrize("encoding", ["float", "base64", openai.omit])
def test_the_official_client_gets_unit_vectors_in_order(encoding: Any) -> None:
    texts = ["a fox", "two hens and a fox", "a"]
    with (
        serving(ScriptedEngine(embed)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        reply = client.embeddings.create(model="gpt-4o", input=texts, encoding_format=encoding)
    rows = [TOKENIZER.encode(text) for text in texts]
    assert [item.index for item in reply.data] == [0, 1, 2]
    for item, tokens in zip(reply.data, rows, strict=True):
        vector = item.embedding
        if isinstance(vector, str):  # it was asked for by name: the client hands it on
            vector = np.frombuffer(base64.b64decode(vector), dtype="<f4")
        np.testing.assert_allclose(vector, unit(tokens), rtol=1e-6)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, rows))


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ("a fox", [TOKENIZER.encode("a fox")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_input_is_text_or_tokens(given: Any, rows: list[list[int]]) -> None:
    data = post(input=given).json()["data"]
    found = np.array([item["embedding"] for item in data])
    np.testing.assert_allclose(found, [unit(row) for row in rows], rtol=1e-6)


@pytest.mark.parametrize("dimensions", [1, 2, 4])
def test_vectors_are_cut_to_the_dimensions_and_have_length_1_again(dimensions: int) -> None:
    (item,) = post(input=[5, 6], dimensions=dimensions).json()["data"]
    kept = vector_of([5, 6])[:dimensions]
    np.testing.assert_allclose(item["embedding"], kept / np.linalg.norm(kept), rtol=1e-6)


def test_more_dimensions_than_the_model_has_are_refused() -> None:
    response = post(input="a", dimensions=5)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "dimensions"
    assert "at most 4" in response.json()["error"]["message"]


@cases(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": [MODEL.vocab_size]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [5] * MODEL.max_len}, "input"),
        ({"input": ["a"] * 513}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "model": "gpt-4"}, "model"),
        ({"input": "a", "inputs": "b"}, "inputs"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    response = post(**fields)
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param


def test_if_one_fails_the_others_are_stopped() -> None:
    engine = ScriptedEngine(hang(), fail("full"))
    with serving(engine) as url:
        response = httpx.post(
            f"{url}/v1/embeddings", json={"model": "stories", "input": ["a", "b"]}
        )
    assert response.status_code == 503
    assert len(engine.aborted) == 1
    assert post(hang(), input="a", timeout=0.05).status_code == 408
