"""Texts to vectors, many at once, and how well pairs of texts match: `/v1/rerank`, `/v1/score`.

A reranker's score is how likely it says yes rather than no; that of any other model is the cosine
of the two texts' embeddings.
"""

from __future__ import annotations

import base64
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from pippin.api.model_info import ModelInfo
from pippin.api.requests import fields as table
from pippin.api.requests.body import MAX_MESSAGES, Body, Leniency, under_owner
from pippin.api.requests.fields import (
    MAX_LOGPROBS,
    FieldTable,
    ValueKind,
    ignored_field,
    refused_field,
    rows_of,
)
from pippin.api.requests.sampling_fields import read_timeout
from pippin.api.served_models import ModelLease, ServedText
from pippin.embedding import embedding_of, embedding_submit, unit
from pippin.engine.engine_client import RequestEngine
from pippin.errors import EngineDead, RequestError
from pippin.messages import Submit, pack_tokens
from pippin.sequences import error_of_delta, room_for_reply
from pippin.tasks import all_or_none
from pippin.text.bundle import DEFAULT_INSTRUCTION, Reranker, TextBundle
from pippin.text.prompt import Prompt, check_nbytes, nbytes_of
from pippin.text.tokenizer import Tokenizer
from pippin.types import SamplingParams, TokenLogprobs

EMBEDDINGS = table.FieldTable(
    {
        **table.MODEL,
        "input": table.texts_or_ids(),
        "encoding_format": table.one_of("float", "base64"),
        "dimensions": table.integer_from(1),
        **table.USER,
        **table.SERVING,
    },
    required=("input",),
)


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


_WHOLE = "texts are not shortened"


class Document(msgspec.Struct):
    text: str


# vLLM's names of the two texts of a pair, the newest first: those of one row are sent together.
PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


_SHARED: table.Fields = {
    **table.MODEL,
    "instruction": table.STRING,
    **table.USER,
    **table.SERVING,
    "max_tokens_per_query": table.integer_from(0),
    "max_tokens_per_doc": table.integer_from(0),
    "truncate_prompt_tokens": refused_field(_WHOLE),
    "use_activation": refused_field("scores are probabilities or cosines", True),
}
RERANK = FieldTable(
    {
        "query": ValueKind("a string, or an object with a text", str | Document),
        "documents": ValueKind(
            f"a string, or a list of 1 to {MAX_MESSAGES:,} strings or objects with a text",
            str | Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_MESSAGES)],
        ),
        "top_n": table.integer_from(0),
        "return_documents": table.BOOLEAN,
        **_SHARED,
        "max_chunks_per_doc": ignored_field("a document is one text"),
        "rank_fields": refused_field("documents have one text", ["text"]),
    },
    required=("query", "documents"),
)
SCORE = FieldTable(
    {name: table.texts_or_ids(ids=False) for pair in PAIRS for name in pair} | _SHARED
)


Pair = tuple[str, str]
_FORCED = 10_000.0  # added to a token's logit: no other is drawn. Its logprob is the model's own.


@dataclass(frozen=True)
class ScoreJob(SubmitsJob):
    """For each pair the two submits whose results make its score."""

    pairs: list[tuple[int, int]]
    by_reranker: bool
    num_prompt_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.num_prompt_tokens


@dataclass(frozen=True)
class RerankJob(ScoreJob):
    documents: list[str]
    top_n: int  # 0: all
    return_documents: bool


def parse_rerank(fields: Any, served: ServedText) -> RerankJob:
    body = RERANK.read(fields, served.rules)
    given = body.get("documents")
    documents = [_text(each) for each in (given if isinstance(given, list) else [given])]
    pairs = [(_text(body.get("query")), document) for document in documents]
    job = _job(body, served, ("query", "documents"), pairs)
    return RerankJob(
        **vars(job),
        documents=documents,
        top_n=body.get("top_n", 0),
        return_documents=body.get("return_documents", True),
    )


def parse_score(fields: Any, served: ServedText) -> ScoreJob:
    body = SCORE.read(fields, served.rules)
    names = _names_of_pairs(body)
    first, second = (rows_of(body.get(name)) for name in names)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        counts = f"{len(first):,} texts and {names[1]} has {len(second):,}"
        raise body.error(names[0], f"has {counts}; send one, or as many as in {names[1]}")
    pairs = list(zip(first, second, strict=True))
    return _job(body, served, names, pairs)


def _names_of_pairs(body: Body) -> tuple[str, str]:
    sent = {name for pair in PAIRS for name in pair if body.has(name)}
    for pair in PAIRS:
        if sent == set(pair):
            return pair
    known = ", or ".join(" and ".join(pair) for pair in PAIRS)
    field = next(iter(sorted(sent)), PAIRS[0][0])
    raise body.error(field, f"and one other are needed: send {known}")


def _text(given: str | Document) -> str:
    return given if isinstance(given, str) else given.text


def _job(body: Body, served: ServedText, names: tuple[str, str], pairs: list[Pair]) -> ScoreJob:
    """Submits of pairs, one for each text that is embedded. No pair is encoded behind one that is
    too long."""
    text, rules, model = served.text, served.rules, served.model
    tokenizer, reranker = text.tokenizer, text.reranker
    if len(pairs) > (most := rules.limits.max_choices):
        limit = f"at most {most:,} are allowed (--max-choices)"
        raise body.error(names[1], f"has {len(pairs):,} texts; {limit}")
    if reranker is None and body.has("instruction"):
        raise body.unsupported("instruction", "only rerankers have one: write it into the text")
    instruction = body.get("instruction", DEFAULT_INSTRUCTION)
    priority, salt = body.get("priority", 0), body.get("cache_salt", b"")
    submits: list[Submit] = []

    def add(submit: Submit) -> int:
        submits.append(submit)
        return len(submits) - 1

    @cache
    def cut(side: int, given: str) -> str:
        """Its first tokens, where the request sets how many of a query or a document are read."""
        most: int = body.get(("max_tokens_per_query", "max_tokens_per_doc")[side], 0)
        if not most:
            return given
        check_nbytes(nbytes_of(given), model.max_prompt_bytes, param=names[side])
        tokens = tokenizer.encode(given, add_special_tokens=False)
        return tokenizer.decode_with_special(tokens[:most]) if tokens[most:] else given

    @cache
    def embedded(side: int, given: str) -> int:
        tokens = text_tokens(given, names[side], text, model)
        return add(embedding_submit(_new_id(), tokens, priority=priority, salt=salt))

    @cache
    def head_of(reranker: Reranker, query: str) -> list[int]:
        return reranker.head(query, instruction, tokenizer)

    def judged(reranker: Reranker, query: str, document: str) -> tuple[int, int]:
        given = zip((*names, "instruction"), (query, document, instruction), strict=True)
        for name, value in given:
            check_nbytes(nbytes_of(value), model.max_prompt_bytes, param=name)
        head = head_of(reranker, query)
        room_for_reply(Prompt(head), model.max_len, param=names[0])
        tokens = head + reranker.tail(document, tokenizer)
        room_for_reply(Prompt(tokens), model.max_len, param=names[1])
        yes, no = (
            Submit(
                _new_id(),
                pack_tokens(tokens),
                SamplingParams(
                    max_tokens=1, temperature=0.0, logprobs=MAX_LOGPROBS, logit_bias={id: _FORCED}
                ),
                boundaries=[len(head)],  # where prompts of other documents begin to differ
                priority=priority,
                salt=salt,
            )
            for id in (reranker.yes_id, reranker.no_id)
        )
        return add(yes), add(no)

    pairs = [(cut(0, query), cut(1, document)) for query, document in pairs]
    if reranker is not None:
        numbers = [judged(reranker, query, document) for query, document in pairs]
        num_tokens = sum(submits[yes].prompt_len for yes, _ in numbers)
    else:
        numbers = [(embedded(0, one), embedded(1, other)) for one, other in pairs]
        num_tokens = sum(submit.prompt_len for submit in submits)
    timeout_s, by_reranker = read_timeout(body, rules.limits), reranker is not None
    return ScoreJob(submits, timeout_s, body.leniency, numbers, by_reranker, num_tokens)


def _new_id() -> str:
    return f"score-{uuid.uuid4().hex}"


async def whole_rerank(job: RerankJob, lease: ModelLease) -> dict[str, Any]:
    scores = await _scores(job, lease.engine)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in best[: job.top_n or None]:
        shown = {"document": {"text": job.documents[index]}} if job.return_documents else {}
        results.append({"index": index, **shown, "relevance_score": scores[index]})
    id = f"rerank-{uuid.uuid4().hex}"
    return {
        "id": id,
        "object": "list",
        "model": lease.served.model.name,
        "usage": _usage(job),
        "results": results,
        # Cohere's:
        "meta": {"tokens": {"input_tokens": job.prompt_tokens, "output_tokens": 0}},
    }


async def whole_score(job: ScoreJob, lease: ModelLease) -> dict[str, Any]:
    scores = await _scores(job, lease.engine)
    return {
        "id": _new_id(),
        "object": "list",
        "created": int(time.time()),
        "model": lease.served.model.name,
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ],
        "usage": _usage(job),
    }


def _usage(job: ScoreJob) -> dict[str, int]:
    return {"prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens}


async def _scores(job: ScoreJob, engine: RequestEngine) -> Sequence[float]:
    if job.by_reranker:
        submits = [(job.submits[yes], job.submits[no]) for yes, no in job.pairs]
        return await all_or_none(_judge(yes, no, engine) for yes, no in submits)
    vectors = await all_or_none(vector_of(submit, engine) for submit in job.submits)
    return [float(vectors[one] @ vectors[other]) for one, other in job.pairs]


def _share(yes: float, no: float) -> float:
    """Of the first of two log probabilities. The difference may be infinite."""
    difference = min(max(no - yes, -700.0), 700.0)
    return 1 / (1 + math.exp(difference))


async def _judge(yes: Submit, no: Submit, engine: RequestEngine) -> float:
    """The second is only run if its token is not among the likeliest of the first."""
    first = await _logprobs(yes, engine)
    (no_id,) = no.params.logit_bias
    likeliest = dict(zip(first.top_ids, first.top_logprobs, strict=True))
    if no_id not in likeliest:
        return _share(first.logprob, (await _logprobs(no, engine)).logprob)
    return _share(first.logprob, likeliest[no_id])


async def _logprobs(submit: Submit, engine: RequestEngine) -> TokenLogprobs:
    found: TokenLogprobs | None = None
    async for delta in engine.generate(submit):
        if delta.finish == "error" or delta.finish == "abort":
            raise error_of_delta(delta)
        found = delta.logprobs[0] if delta.logprobs else found
        if delta.finish is not None and found is not None:
            return found
    raise EngineDead("the engine sent no result for this request; send it again")
