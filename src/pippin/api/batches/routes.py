"""The fields of files and batches (OpenAI's). Knows no file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from pippin.api.batches.batch import ENDPOINTS, WINDOWS_S, Batch
from pippin.api.batches.lines import LineClient, LineRules
from pippin.api.batches.runner import (
    Batches,
    BatchMetrics,
    BatchOwner,
    BatchRunner,
    Storage,
    storage_failed,
)
from pippin.api.batches.store import FileRecord, FileStore, Upload, new_id
from pippin.api.dialects.response_store import ResponseStores
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.generation import Generation
from pippin.api.endpoints.stored_responses import page_of, read_query
from pippin.api.fields import table
from pippin.api.fields.table import MAX_PRIORITY, FieldTable, Members
from pippin.api.http.access_control import client_of, known_keys, owner_of, separates_owners
from pippin.api.http.http_errors import ERROR_HANDLERS, JSONResponse
from pippin.api.http.read_body import FILE_FIELD, Form, read_form
from pippin.api.metered_engine import WrappedEngine
from pippin.api.requests.body import Body
from pippin.engine.engine_client import Engine
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
NO_FIELDS = FieldTable({})


LOWEST_PRIORITY = -MAX_PRIORITY - 1  # below what any client may ask for


class BatchEngine(WrappedEngine):
    def __init__(self, engine: Engine, places: asyncio.Semaphore) -> None:
        super().__init__(engine)
        self._places = places  # of all lines

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        async with self._places:
            last = msgspec.structs.replace(submit, priority=LOWEST_PRIORITY)
            async with aclosing(self._engine.generate(last)) as deltas:
                async for delta in deltas:
                    yield delta


FILES_PATH = "/v1/files"
FILE_PATH = f"{FILES_PATH}/{{id}}"


class FileRoutes:
    def __init__(self, batches: Batches, state: AppState) -> None:
        self._batches = batches
        self._rules = state.rules
        self._bodies = state.bodies

    def routes(self) -> list[Route]:
        return [
            Route(FILES_PATH, self._create, methods=["POST"]),
            Route(FILES_PATH, self._list, methods=["GET"]),
            Route(FILE_PATH, self._show, methods=["GET"]),
            Route(FILE_PATH, self._delete, methods=["DELETE"]),
            Route(f"{FILE_PATH}/content", self._content, methods=["GET"]),
        ]

    async def _create(self, request: Request) -> Response:
        files = self._of(request)
        upload = files.upload()
        try:
            limits, most = self._rules.limits, files.max_file_bytes
            with self._bodies.claim(client_of(request.scope)) as claim:
                form = await read_form(request, limits, most, claim, upload.write)
            record = await asyncio.to_thread(self._store, form, upload)
        except OSError as error:
            raise storage_failed(error) from error
        finally:
            upload.discard()
        return JSONResponse(record.wire())

    async def _list(self, request: Request) -> Response:
        query = read_query(request, FILE_LIST, self._rules)
        purpose = query.get("purpose")
        found = [f.wire() for f in self._of(request).records() if purpose in (None, f.purpose)]
        if query.get("order", "desc") == "desc":
            found.reverse()
        return JSONResponse(page_of(found, query, limit=MAX_LISTED_FILES, what="a file"))

    async def _show(self, request: Request) -> Response:
        read_query(request, NO_FIELDS, self._rules)
        return JSONResponse(self._record(request).wire())

    async def _content(self, request: Request) -> Response:
        read_query(request, NO_FIELDS, self._rules)
        path = self._of(request).path(self._record(request).id)
        return FileResponse(path, media_type="application/octet-stream")

    async def _delete(self, request: Request) -> Response:
        read_query(request, NO_FIELDS, self._rules)
        id = self._record(request).id
        try:
            await asyncio.to_thread(self._of(request).delete, id)
        except OSError as error:
            raise storage_failed(error) from error
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    def _of(self, request: Request) -> FileStore:
        return self._batches.of(owner_of(request.scope)).files

    def _record(self, request: Request) -> FileRecord:
        return self._of(request).get(request.path_params["id"])

    def _store(self, form: Form, upload: Upload) -> FileRecord:
        body = Body(_nested(form.fields))
        UPLOAD.check(body, self._rules)
        if form.filename is None or not upload.nbytes:
            raise RequestError("file is missing or empty; it must have content", param=FILE_FIELD)
        expiry = body.object("expires_after")
        expires_s = None if expiry is None else expiry.get("seconds")
        return upload.finish(form.filename, body.get("purpose"), expires_s)


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


BATCHES_PATH = "/v1/batches"
BATCH_PATH = f"{BATCHES_PATH}/{{id}}"


class BatchRoutes:
    def __init__(self, state: AppState, batches: Batches) -> None:
        self._state = state
        self._rules = state.rules
        self._batches = batches

    def routes(self) -> list[Route]:
        return [
            Route(BATCHES_PATH, self._create, methods=["POST"]),
            Route(BATCHES_PATH, self._list, methods=["GET"]),
            Route(BATCH_PATH, self._show, methods=["GET"]),
            Route(f"{BATCH_PATH}/cancel", self._cancel, methods=["POST"]),
        ]

    async def _create(self, request: Request) -> Response:
        owner = self._of(request)

        def read(given: Any) -> Batch:
            body = self._rules.body(given)
            BATCH.check(body, self._rules)
            return self._batch(body, owner)

        batch = await self._state.read_json(request, read)
        await self._batches.create(owner, batch)
        return JSONResponse(batch.wire())

    async def _list(self, request: Request) -> Response:
        query = read_query(request, BATCH_LIST, self._rules)
        found = [batch.wire() for batch in reversed(self._of(request).batches.batches())]
        return JSONResponse(page_of(found, query, limit=20, what="a batch"))

    async def _show(self, request: Request) -> Response:
        read_query(request, NO_FIELDS, self._rules)
        return JSONResponse(self._batch_of(request).wire())

    async def _cancel(self, request: Request) -> Response:
        read_query(request, NO_FIELDS, self._rules)
        batch = self._batch_of(request)
        return JSONResponse(await self._batches.cancel(self._of(request), batch))

    def _of(self, request: Request) -> BatchOwner:
        return self._batches.of(owner_of(request.scope))

    def _batch_of(self, request: Request) -> Batch:
        return self._of(request).batches.get(request.path_params["id"])

    def _batch(self, body: Body, owner: BatchOwner) -> Batch:
        input = owner.files.get(body.get("input_file_id"))
        if input.purpose != "batch":
            raise body.error("input_file_id", 'names results; it must name a file for "batch"')
        expiry = body.object("output_expires_after")
        return Batch(
            new_id("batch_"),
            endpoint=body.get("endpoint"),
            input_file_id=input.id,
            completion_window=body.get("completion_window"),
            model="" if self._state.models.are_several else self._rules.model.name,
            created_at=int(time.time()),
            metadata=body.get("metadata"),
            output_expires_s=None if expiry is None else expiry.get("seconds"),
        )


NOT_STORED = ResponseStores(0, 0)  # thousands of lines would evict what live requests stored


def create_batches(state: AppState, metrics: BatchMetrics) -> Batches:
    """Their replies are not timed: those times are of live requests."""
    config = state.config
    num_lines = config.batch_running or 1
    places = asyncio.Semaphore(num_lines)
    lines = replace(
        state,
        # A line waits for live requests: only its own timeout ends it, or that of the batch.
        limits=replace(state.limits, request_timeout=None),
        use=lambda _, engine: BatchEngine(engine, places),
    )
    app = Starlette(
        routes=Generation(lines, NOT_STORED).routes(), exception_handlers=ERROR_HANDLERS
    )
    line_rules = LineRules(state.limits.max_body_bytes, state.models.check_name)
    runner = BatchRunner(LineClient(app), line_rules, num_lines, metrics)
    directory = config.batch_dir if config.batch_bytes else None
    storage = Storage(
        directory=None if directory is None else Path(directory).expanduser(),
        owners=tuple(known_keys(config).owners()),
        separates=separates_owners(config),
        max_bytes=config.batch_bytes,
        max_file_bytes=config.batch_file_bytes,
    )
    return Batches(storage, runner)
