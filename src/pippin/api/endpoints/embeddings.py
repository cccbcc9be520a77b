"""OpenAI's `/v1/embeddings`: texts to vectors, many at once."""

from __future__ import annotations

import base64
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import Leniency, under_owner
from pippin.api.requests.fields import FieldTable, rows_of
from pippin.api.requests.openai_fields import EMBEDDINGS
from pippin.api.requests.sampling_fields import read_timeout
from pippin.api.served_models import ModelLease, ServedText
from pippin.embedding import embedding_of, embedding_submit, unit
from pippin.engine.engine_client import RequestEngine
from pippin.errors import EngineDead, RequestError
from pippin.messages import Submit
from pippin.sequences import room_for_reply
from pippin.tasks import all_or_none
from pippin.text.bundle import TextBundle
from pippin.text.prompt import Prompt, check_nbytes, nbytes_of
from pippin.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SubmitsJob:
    """Submits that run side by side and generate no text."""

    submits: list[Submit]
    timeout_s: float | None
    leniency: Leniency

    def keep_apart(self, owner_salt: bytes) -> None:
        self.submits[:] = [under_owner(submit, owner_salt) for submit in self.submits]

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        return {"prompt_tokens": self.prompt_tokens}

    @property
    def prompt_tokens(self) -> int:
        return sum(submit.prompt_len for submit in self.submits)


@dataclass(frozen=True)
class EmbeddingJob(SubmitsJob):
    encoding_format: str
    dimensions: int | None  # that are kept of each vector; None: all
    keep_alive_s: float | None  # Ollama's: for which its model stays loaded


def parse_embeddings(
    fields: Any, served: ServedText, table: FieldTable = EMBEDDINGS, *, truncate: bool = False
) -> EmbeddingJob:
    """`truncate`: of a text that is too long, only as much is read as fits, if nothing is sent."""
    text, rules = served.text, served.rules
    body = table.read(fields, rules)
    truncate = body.get("truncate", truncate)
    items, most = rows_of(body.get("input")), rules.limits.max_choices
    if len(items) > most:
        limit = f"at most {most:,} are allowed (--max-choices)"
        raise body.error("input", f"has {len(items):,} texts; {limit}")
    rows = [
        text_tokens(item, "input", text, rules.model, f"input[{number}]", truncate=truncate)
        for number, item in enumerate(items)
    ]
    priority, salt = body.get("priority", 0), body.get("cache_salt", b"")
    id = f"embd-{uuid.uuid4().hex}"
    return EmbeddingJob(
        [
            embedding_submit(f"{id}-{index}", tokens, priority=priority, salt=salt)
            for index, tokens in enumerate(rows)
        ],
        read_timeout(body, rules.limits),
        body.leniency,
        body.get("encoding_format", "float"),
        body.get("dimensions"),
        body.get("keep_alive"),
    )


def text_tokens(
    item: str | list[int],
    param: str,
    text: TextBundle,
    model: ModelInfo,
    name: str | None = None,
    *,
    truncate: bool = False,
) -> list[int]:
    """What the model reads of a text; `name`: where it stands in the field `param`."""
    if isinstance(item, str):
        if truncate:
            item = item.encode(errors="replace")[: model.max_prompt_bytes].decode(errors="ignore")
        check_nbytes(nbytes_of(item), model.max_prompt_bytes, param=param)
    tokens = text.tokenizer.encode(item) if isinstance(item, str) else item
    if not tokens:
        raise RequestError(f"{name or param} is empty; it must have a token", param=param)
    if truncate:
        tokens = tokens[: model.max_len - 1]
    room_for_reply(Prompt(tokens), model.max_len, param=param)
    return tokens


async def embed_all(job: EmbeddingJob, engine: RequestEngine) -> list[np.ndarray]:
    vectors = await all_or_none(vector_of(submit, engine) for submit in job.submits)
    if job.dimensions is not None:
        vectors = [_shortened(vector, job.dimensions) for vector in vectors]
    return vectors


async def whole_embeddings(job: EmbeddingJob, lease: ModelLease) -> dict[str, Any]:
    vectors = await embed_all(job, lease.engine)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, job)}
            for index, vector in enumerate(vectors)
        ],
        "model": lease.served.model.name,
        "usage": {"prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens},
    }


async def vector_of(submit: Submit, engine: RequestEngine) -> np.ndarray:
    async for delta in engine.generate(submit):
        if delta.finish is not None:
            return embedding_of(delta)
    raise EngineDead("the engine sent no result for this request; send it again")


def _shortened(vector: np.ndarray, dimensions: int) -> np.ndarray:
    """As OpenAI does it: models that are trained for it have the most in the first numbers."""
    if dimensions > len(vector):
        raise RequestError(
            f"dimensions is {dimensions:,}; it must be at most {len(vector):,}, the length of this "
            "model's vectors",
            param="dimensions",
        )
    return unit(vector[:dimensions])


def _encoded(vector: np.ndarray, job: EmbeddingJob) -> list[float] | str:
    if job.encoding_format == "float":
        numbers: list[float] = vector.tolist()
        return numbers
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
