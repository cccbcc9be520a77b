"""Files and batches over HTTP, as OpenAI has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from pippin.api.batches.runner import Batches, LineClient
from pippin.api.batches.store import ENDPOINTS, WINDOWS_S, Batch, FileRecord, OwnerStore, new_id
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.generation import page_of
from pippin.api.http.access_control import client_of, owner_of
from pippin.api.http.answers import ERROR_HANDLERS, JSONResponse
from pippin.api.http.read_body import FILE_FIELD, Form, read_form
from pippin.api.requests import fields as table
from pippin.api.requests.body import Body
from pippin.api.requests.fields import MAX_PRIORITY, FieldTable, Members
from pippin.api.response_store import ResponseStores
from pippin.engine.engine_client import RequestEngine
from pippin.errors import RequestError
from pippin.messages import Submit, TokenDelta

MAX_LISTED_FILES, MAX_LISTED_BATCHES = 10_000, 100
PURPOSES = ("batch", "batch_output")
_EXPIRY = Members(
    "an object with an anchor of created_at, and seconds",
    table=FieldTable(
        {"anchor": table.one_of("created_at"), "seconds": table.integer_from(3_600, 2_592_000)},
        required=("anchor", "seconds"),
    ),
)
UPLOAD = FieldTable(  # beside the file
    {"purpose": table.one_of("batch"), "expires_after": _EXPIRY}, required=("purpose",)
)
BATCH = FieldTable(
    {
        "input_file_id": table.LABEL,
        "endpoint": table.one_of(*ENDPOINTS),
        "completion_window": table.one_of(*WINDOWS_S),
        "metadata": table.Labels(),
        "output_expires_after": _EXPIRY,
    },
    required=("input_file_id", "endpoint", "completion_window"),
)
FILE_LIST = FieldTable(  # of a query
    {
        "purpose": table.one_of(*PURPOSES),
        "limit": table.integer_from(1, MAX_LISTED_FILES),
        "order": table.one_of("asc", "desc"),
        "after": table.STRING,
    }
)
BATCH_LIST = FieldTable({"limit": table.integer_from(1, MAX_LISTED_BATCHES), "after": table.STRING})


async def create_file(state: AppState, request: Request) -> Response:
    owner = _owner(state, request)
    upload = await asyncio.to_thread(owner.upload)

    def store(form: Form) -> FileRecord:
        body = Body(_nested(form.fields))
        UPLOAD.check(body, state.rules)
        if form.filename is None or not upload.nbytes:
            raise RequestError("file is missing or empty; it must have content", param=FILE_FIELD)
        expiry = body.object("expires_after")
        expires_s = None if expiry is None else expiry.get("seconds")
        return upload.finish(form.filename, body.get("purpose"), expires_s)

    try:
        with state.bodies.claim(client_of(request.scope)) as claim:
            most = owner.max_file_bytes
            form = await read_form(request, state.limits, most, claim, upload)
        record = await asyncio.to_thread(store, form)
    finally:
        upload.discard()
    return JSONResponse(record.wire())


def _nested(given: dict[str, str]) -> dict[str, Any]:
    """`a[b]` is the member b of a, as official clients spell it."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        outer, bracket, inner = name.partition("[")
        if not bracket:
            found[name] = value
            continue
        members = found.setdefault(outer, {})
        if not isinstance(members, dict):
            raise RequestError(f"{outer} is both a value and an object", param=outer)
        is_number = value.isdecimal() and len(value) < 10
        members[inner.removesuffix("]")] = int(value) if is_number else value
    return found


async def list_files(state: AppState, request: Request) -> Response:
    query = request.state.query
    purpose = query.get("purpose")
    records = await asyncio.to_thread(_owner(state, request).files)
    found = [file.wire() for file in records if purpose in (None, file.purpose)]
    if query.get("order", "desc") == "desc":
        found.reverse()
    return page_of(found, query, limit=MAX_LISTED_FILES, what="a file")


async def show_file(state: AppState, request: Request) -> Response:
    record = await asyncio.to_thread(_owner(state, request).file, request.path_params["id"])
    return JSONResponse(record.wire())


async def file_content(state: AppState, request: Request) -> Response:
    owner = _owner(state, request)
    file = await asyncio.to_thread(owner.file, request.path_params["id"])
    media_type = "application/octet-stream"
    if file.purpose == "batch":
        return FileResponse(owner.path(file.id), media_type=media_type)
    headers = {"content-length": str(file.nbytes)}
    return StreamingResponse(map(b"".join, owner.results(file.id)), 200, headers, media_type)


async def delete_file(state: AppState, request: Request) -> Response:
    id = request.path_params["id"]
    await asyncio.to_thread(_owner(state, request).delete_file, id)
    return JSONResponse({"id": id, "object": "file", "deleted": True})


async def create_batch(state: AppState, request: Request) -> Response:
    owner = _owner(state, request)

    def read(given: Any) -> Batch:
        body = state.rules.body(given)
        BATCH.check(body, state.rules)
        input = owner.file(body.get("input_file_id"))
        if input.purpose != "batch":
            raise body.error("input_file_id", 'names results; it must name a file for "batch"')
        expiry = body.object("output_expires_after")
        return Batch(
            new_id("batch_"),
            endpoint=body.get("endpoint"),
            input_file_id=input.id,
            completion_window=body.get("completion_window"),
            model="" if state.models.are_several else state.rules.model.name,
            created_at=int(time.time()),
            metadata=body.get("metadata"),
            output_expires_s=None if expiry is None else expiry.get("seconds"),
        )

    batch = await state.read_json(request, read)
    await state.batches.create(owner, batch)
    return JSONResponse(batch.wire())


async def list_batches(state: AppState, request: Request) -> Response:
    found = [batch.wire() for batch in reversed(list(_owner(state, request).batches.values()))]
    return page_of(found, request.state.query, limit=20, what="a batch")


async def show_batch(state: AppState, request: Request) -> Response:
    return JSONResponse(_owner(state, request).batch(request.path_params["id"]).wire())


async def cancel_batch(state: AppState, request: Request) -> Response:
    owner = _owner(state, request)
    batch = owner.batch(request.path_params["id"])
    return JSONResponse(await state.batches.cancel(owner, batch))


def _owner(state: AppState, request: Request) -> OwnerStore:
    return state.batches.of(owner_of(request.scope))


LOWEST_PRIORITY = -MAX_PRIORITY - 1  # below what any client may ask for


class LineEngine:
    """An engine of which lines use a limited number of places, behind live requests."""

    def __init__(self, engine: RequestEngine, places: asyncio.Semaphore) -> None:
        self._engine = engine
        self._places = places  # of all lines
        self.finish = engine.finish

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        async with self._places:
            last = msgspec.structs.replace(submit, priority=LOWEST_PRIORITY)
            async with aclosing(self._engine.generate(last)) as deltas:
                async for delta in deltas:
                    yield delta


NOT_STORED = ResponseStores(0, 0)  # thousands of lines would evict what live requests stored


def create_batches(state: AppState, routes_of: Callable[[AppState], list[Route]]) -> Batches:
    """Their replies are not timed: those times are of live requests."""
    config = state.config
    places = asyncio.Semaphore(config.batch_running or 1)
    lines = AppState(
        state.models,
        config,
        # A line waits for live requests: only its own timeout ends it, or that of the batch.
        replace(state.limits, request_timeout=None),
        NOT_STORED,
        use=lambda _, engine: LineEngine(engine, places),
        workers=state.workers,
    )
    app = Starlette(routes=routes_of(lines), exception_handlers=ERROR_HANDLERS)
    return Batches(
        config,
        LineClient(app),
        state.limits.max_body_bytes,
        state.models.get,
        state.metrics.registry,
    )
