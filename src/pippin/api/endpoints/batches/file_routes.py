"""`/v1/files`: sent, listed, read, deleted. Knows no batch and no line."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from pippin.api.batches.batches import Batches, storage_failed
from pippin.api.batches.file_store import FileRecord, FileStore, Upload
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.listing import page_of, read_query
from pippin.api.fields import files as fields
from pippin.api.http.form_upload import FILE_FIELD, Form, read_form
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.keys import client_of, owner_of
from pippin.api.requests.body import Body
from pippin.errors import RequestError

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
        query = read_query(request, fields.FILE_LIST, self._rules)
        purpose = query.get("purpose")
        found = [f.wire() for f in self._of(request).records() if purpose in (None, f.purpose)]
        if query.get("order", "desc") == "desc":
            found.reverse()
        return JSONResponse(page_of(found, query, limit=fields.MAX_LISTED_FILES, what="a file"))

    async def _show(self, request: Request) -> Response:
        read_query(request, fields.NO_FIELDS, self._rules)
        return JSONResponse(self._record(request).wire())

    async def _content(self, request: Request) -> Response:
        read_query(request, fields.NO_FIELDS, self._rules)
        path = self._of(request).path(self._record(request).id)
        return FileResponse(path, media_type="application/octet-stream")

    async def _delete(self, request: Request) -> Response:
        read_query(request, fields.NO_FIELDS, self._rules)
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
        fields.UPLOAD.check(body, self._rules)
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
