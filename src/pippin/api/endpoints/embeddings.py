"""OpenAI's `/v1/embeddings`: texts to vectors, many at once. Knows no HTTP."""

from __future__ import annotations

import base64
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from pippin.api.endpoints.timeouts import read_timeout
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import Body
from pippin.api.requests.fields import check_fields
from pippin.api.requests.salts import read_salt, under_owner
from pippin.api.requests.sampling_fields import are_token_ids, read_priority, token_ids_in_words
from pippin.config import LimitsConfig
from pippin.embedding import embedding_of, embedding_submit
from pippin.engine.engine_client import Engine
from pippin.errors import EngineDead, RequestError
from pippin.messages import Submit
from pippin.sequences import room_for_reply
from pippin.tasks import all_or_none
from pippin.text.bundle import TextBundle
from pippin.text.prompt import Prompt, check_nbytes, nbytes_of

EMBEDDINGS_HONOURED = frozenset(
    {"input", "model", "encoding_format", "dimensions", "user", "priority", "timeout", "cache_salt"}
)
FORMATS = ("float", "base64")


@dataclass(frozen=True)
class EmbeddingJob:
    submits: list[Submit]
    encoding_format: str
    dimensions: int | None  # that the client counts on
    timeout_s: float | None

    def keep_apart(self, owner_salt: bytes) -> None:
        """Share no prefix with requests of other owners."""
        self.submits[:] = [under_owner(submit, owner_salt) for submit in self.submits]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(submit.tokens) for submit in self.submits)


def parse_embeddings(
    fields: Any, text: TextBundle, model: ModelInfo, limits: LimitsConfig
) -> EmbeddingJob:
    body = Body(fields)
    check_fields(body, EMBEDDINGS_HONOURED, {})
    body.require("model")
    model.check_name(body.string("model", ""))
    body.label("user")
    encoding_format = body.string("encoding_format", "float")
    if encoding_format not in FORMATS:
        raise body.wrong("encoding_format", " or ".join(FORMATS))
    rows = _read_rows(body, text, model, limits)
    priority, salt = read_priority(body), read_salt(body)
    id = f"embd-{uuid.uuid4().hex}"
    return EmbeddingJob(
        [
            embedding_submit(f"{id}-{index}", tokens, priority=priority, salt=salt)
            for index, tokens in enumerate(rows)
        ],
        encoding_format,
        body.integer("dimensions", 1, None, None),
        read_timeout(body, limits),
    )


def _read_rows(
    body: Body, text: TextBundle, model: ModelInfo, limits: LimitsConfig
) -> list[list[int]]:
    given = body.require("input")
    if isinstance(given, str) or are_token_ids(given, model.vocab_size):
        items = [given]
    else:
        items = given if isinstance(given, list) else []
    texts = all(isinstance(item, str) for item in items)
    if not items or not (texts or all(are_token_ids(i, model.vocab_size) for i in items)):
        allowed = token_ids_in_words(model.vocab_size)
        raise body.wrong(
            "input",
            f"a string, a list of strings, a list of {allowed}, or a list of such lists",
        )
    if len(items) > limits.max_choices:
        raise RequestError(
            f"input has {len(items):,} texts; this server takes at most "
            f"{limits.max_choices:,} (--max-choices)",
            param="input",
        )
    return [_row(item, number, text, model) for number, item in enumerate(items)]


def _row(item: str | list[int], number: int, text: TextBundle, model: ModelInfo) -> list[int]:
    if isinstance(item, str):
        check_nbytes(nbytes_of(item), model.max_prompt_bytes, param="input")
    tokens = text.tokenizer.encode(item) if isinstance(item, str) else item
    if not tokens:
        raise RequestError(f"input {number} is empty: it has no vector", param="input")
    room_for_reply(Prompt(tokens), model.max_len, param="input")
    return tokens


class EmbeddingReply:
    def __init__(self, job: EmbeddingJob, engine: Engine, model: ModelInfo) -> None:
        self._job = job
        self._engine = engine
        self._model = model

    async def whole(self) -> dict[str, Any]:
        vectors = await self._vectors()
        asked = self._job.dimensions
        if asked is not None and asked != len(vectors[0]):
            raise RequestError(
                f"dimensions is {asked:,}; this model's vectors have {len(vectors[0]):,}, "
                "and are not shortened",
                param="dimensions",
            )
        num_tokens = self._job.prompt_tokens
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": self._model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    async def _vectors(self) -> list[np.ndarray]:
        return await all_or_none(self._vector(submit) for submit in self._job.submits)

    async def _vector(self, submit: Submit) -> np.ndarray:
        async for delta in self._engine.generate(submit):
            if delta.finish is not None:
                return embedding_of(delta)
        raise EngineDead("the engine said nothing")

    def _encoded(self, vector: np.ndarray) -> list[float] | str:
        if self._job.encoding_format == "float":
            numbers: list[float] = vector.tolist()
            return numbers
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
