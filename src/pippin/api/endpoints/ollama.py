"""Ollama's API: replies, models, and the Hugging Face hub's cache, which pull and delete change.

The server goes on serving the model that it serves: what is pulled is for the next start.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from time import perf_counter, time
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pippin.amounts import FOR_EVER
from pippin.api.dialects.ollama import (
    DELETE,
    EMBED,
    EMBEDDINGS,
    HEARTBEAT,
    PULL,
    SHOW,
    LoadRequest,
    OllamaStream,
    line,
    nanoseconds,
    ollama_error,
    rfc3339,
)
from pippin.api.endpoints.app_state import AppState, Handler
from pippin.api.endpoints.embeddings import EmbeddingJob, embed_all, parse_embeddings
from pippin.api.endpoints.generation import TextAnswer, answer
from pippin.api.http.access_control import check_downloads
from pippin.api.http.answers import JSONResponse, record_of
from pippin.api.http.sending import JSON_LINES, StreamResponse, WholeResponse
from pippin.api.job import Job, prepare
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.fields import FieldTable
from pippin.api.requests.neutral_request import ChatRequest, CompletionRequest
from pippin.api.served_models import LATEST, ModelLease, ServedModel, ServedText
from pippin.errors import LoadError, Overloaded, RequestError, cut
from pippin.hub import HUB_ID, delete_cached_model, find_cached_model, pull_progress

Progress = dict[str, Any]
SUCCESS: Progress = {"status": "success"}
HUB_PREFIX = re.compile(r"(https?://)?(hf\.co|huggingface\.co)/")  # as Ollama's users write it
REVISION = re.compile(r"\w[\w.-]{0,127}")


async def pull(state: AppState, request: Request) -> Response:
    name, body = await _named(state, request, PULL)
    progress = _progress(state, name)
    if not body.get("stream", True):
        return WholeResponse(lambda: _last(progress), None)
    return StreamResponse(
        _lines(progress),
        encode_error=lambda error: line(ollama_error(error)),
        timeout_s=None,
        media_type=JSON_LINES,
        heartbeat=lambda: HEARTBEAT,
    )


async def delete(state: AppState, request: Request) -> Response:
    name, _ = await _named(state, request, DELETE)
    id, _ = _hub_id(name)
    if _serves(state, name):
        raise RequestError(f"model {id!r} is served by this server: stop it first")
    await asyncio.to_thread(_delete, id)
    return Response()


async def _named(state: AppState, request: Request, table: FieldTable) -> tuple[str, Body]:
    check_downloads(state.config, request.scope)

    def read(fields: Any) -> tuple[str, Body]:
        body = state.rules.body(fields)
        table.check(body, state.rules)
        field = "model" if body.has("model") else "name"  # the older name of it
        return body.required_string(field), body

    name, body = await state.read_json(request, read)
    record_of(request.scope).ignored = body.leniency.header()
    return name, body


async def _lines(progress: AsyncGenerator[Progress, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(progress):
        async for each in progress:
            yield line(each)


async def _last(progress: AsyncGenerator[Progress, None]) -> Progress:
    async with aclosing(progress):
        async for _ in progress:
            pass
    return SUCCESS


async def _progress(state: AppState, name: str) -> AsyncGenerator[Progress, None]:
    if _serves(state, name):
        yield SUCCESS
        return
    id, revision = _hub_id(name)
    if state.downloads:
        raise Overloaded(
            f"{', '.join(state.downloads)} is being downloaded, and one model is at a time: pull "
            f"{cut(name)} when that is done"
        )
    state.downloads.add(id)
    try:
        async with aclosing(pull_progress(id, revision)) as progress:
            async for each in progress:
                yield each
    finally:
        state.downloads.clear()


def _serves(state: AppState, name: str) -> bool:
    """Clients pull a model that they do not find in `/api/tags`."""
    plain = name.removesuffix(LATEST)
    accepted = [model.info.accepted_names for model in state.models]
    if any(names is not None and plain in names for names in accepted):
        return True
    return None in accepted and not HUB_ID.fullmatch(plain)


def _hub_id(name: str) -> tuple[str, str | None]:
    """The id and the revision in `owner/name`, `hf.co/owner/name` and `owner/name:revision`."""
    id, _, tag = HUB_PREFIX.sub("", name, count=1).partition(":")
    revision = None if tag in ("", LATEST.removeprefix(":")) else tag
    is_revision = revision is None or REVISION.fullmatch(revision)
    if not HUB_ID.fullmatch(id) or not is_revision:
        raise RequestError(
            f"model is {cut(name)!r}; models are pulled from the Hugging Face hub: it must be an "
            "id such as Qwen/Qwen3.5-0.8B, with an optional :revision",
            param="model",
        )
    return id, revision


def _delete(id: str) -> None:
    try:
        delete_cached_model(find_cached_model(id))
    except LoadError as error:  # another server serves it
        raise RequestError(error.message) from error


# Of Ollama. Clients refuse servers that are older than what they use: VS Code's Copilot asks for
# 0.6.4, `codex --oss` for 0.13.4 (Responses), agents that speak Messages for 0.14.2. All of that is
# here; what later versions added is not.
API_VERSION = "0.14.2"
NEVER = "2318-01-01T00:00:00Z"  # when the model is unloaded


async def version(state: AppState, request: Request) -> Response:
    return JSONResponse({"version": API_VERSION})


async def tags(state: AppState, request: Request) -> Response:
    models = [
        each | {"modified_at": rfc3339(model.info.created_s)}
        for model in state.models
        for each in _listed(model.info)
    ]
    return JSONResponse({"models": models})


async def ps(state: AppState, request: Request) -> Response:
    models = [
        each | _loaded(model)
        for model in state.models
        if model.residency.is_loaded
        for each in _listed(model.info)
    ]
    return JSONResponse({"models": models})


def show(fields: Any, served: ServedText) -> TextAnswer:
    body, text, model = SHOW.read(fields, served.rules), served.text, served.model
    family = model.checkpoint.family
    capabilities = {
        "completion": True,
        "tools": text.formats.tools is not None,
        "insert": text.fill_in_middle is not None,
        "thinking": text.formats.reasoning is not None,
    }
    shown = {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "",
        "template": "" if text.chat is None else text.chat.source,
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.basename": model.name,
            f"{family}.context_length": model.max_len,
            f"{family}.vocab_size": model.vocab_size,
        },
        "capabilities": [name for name, has_it in capabilities.items() if has_it],
        "modified_at": rfc3339(model.created_s),
    }
    return shown, body.leniency


def _listed(model: ModelInfo) -> list[dict[str, Any]]:
    names = [name if ":" in name else name + LATEST for name in model.names]
    return [
        {
            "name": name,
            "model": name,
            "size": model.checkpoint.nbytes,
            "digest": model.checkpoint.digest,
            "details": _details(model),
        }
        for name in names
    ]


def _loaded(model: ServedModel) -> dict[str, Any]:
    left, info = model.residency.seconds_left, model.info
    return {
        "expires_at": NEVER if left is None else rfc3339(time() + left),
        "size_vram": model.residency.nbytes or info.checkpoint.nbytes,
        "context_length": info.max_len,
    }


def _details(model: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": model.checkpoint.family,
        "families": [model.checkpoint.family],
        "parameter_size": "",
        "quantization_level": model.checkpoint.quantization,
    }


OllamaJob = Job | EmbeddingJob | LoadRequest
J = TypeVar("J", bound=OllamaJob)


class _Unload(Exception):
    """A request that needs no engine: its model is not loaded to be unloaded."""

    def __init__(self, load: LoadRequest, name: str) -> None:
        self.load, self.name = load, name


def replies(
    parse: Callable[[Any, RequestRules], ChatRequest | CompletionRequest | LoadRequest],
    dialect: type[OllamaStream],
    empty: dict[str, Any],
) -> Handler:
    """`empty`: a reply without text."""

    def read(fields: Any, served: ServedText) -> Job | LoadRequest:
        asked = parse(fields, served.rules)
        if not isinstance(asked, LoadRequest):
            is_chat = isinstance(asked, ChatRequest)
            return prepare(asked, served, "chatcmpl-" if is_chat else "cmpl-")
        if asked.keep_alive_s == 0 and served.model.on_demand:
            raise _Unload(asked, served.model.name)
        return asked

    def without_text(name: str, load: LoadRequest) -> Response:
        head = {"model": name, "created_at": rfc3339()}
        return JSONResponse({**head, **empty, "done": True, "done_reason": load.done_reason})

    async def handle(state: AppState, request: Request) -> Response:
        try:
            job, lease = await _prepare(state, request, read)
        except _Unload as unload:
            state.keys.check_admin(request.scope)
            state.models.get(unload.name).keep_alive(0.0)
            record_of(request.scope).ignored = unload.load.leniency.header()
            return without_text(unload.name, unload.load)
        if isinstance(job, LoadRequest):
            return without_text(lease.served.model.name, job)
        return answer(job, lease, dialect(job, lease))

    return handle


async def embed(state: AppState, request: Request) -> Response:
    started = perf_counter()
    job, lease = await _prepare(
        state, request, partial(parse_embeddings, table=EMBED, truncate=True)
    )

    async def reply() -> dict[str, Any]:
        vectors = await embed_all(job, lease.engine)
        return {
            "model": lease.served.model.name,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": nanoseconds(perf_counter() - started),
            "load_duration": nanoseconds(lease.waited_s),
            "prompt_eval_count": job.prompt_tokens,
        }

    return WholeResponse(reply, job.timeout_s)


async def embeddings(state: AppState, request: Request) -> Response:
    read = partial(parse_embeddings, table=EMBEDDINGS, truncate=True)
    job, lease = await _prepare(state, request, read)

    async def reply() -> dict[str, Any]:
        (vector,) = await embed_all(job, lease.engine)
        return {"embedding": vector.tolist()}

    return WholeResponse(reply, job.timeout_s)


async def _prepare(
    state: AppState, request: Request, read: Callable[[Any, ServedText], J]
) -> tuple[J, ModelLease]:
    """`keep_alive` counts from the end of this request. It is every client's model, so where
    keys are set an admin's `keep_alive` alone has an effect."""
    is_admin = state.keys.is_admin(request.scope)

    def checked(fields: Any, served: ServedText) -> J:
        job = read(fields, served)
        if job.keep_alive_s is not None and served.model.on_demand and not is_admin:
            job.leniency.ignore("keep_alive", "it needs an admin key (--admin-key)")
        return job

    job, lease = await state.prepare(request, checked)
    if is_admin and job.keep_alive_s is not None:
        model = state.models.get(lease.served.model.name)
        model.keep_alive(None if job.keep_alive_s == FOR_EVER else job.keep_alive_s)
    return job, lease
