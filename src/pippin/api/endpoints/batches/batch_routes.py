"""`/v1/batches`: created, listed, shown, cancelled. Knows no line of a batch."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.batches.batch import Batch
from pippin.api.batches.batches import Batches
from pippin.api.batches.durable import new_id
from pippin.api.batches.runner import BatchOwner
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.listing import page_of, read_query
from pippin.api.fields import files as fields
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.keys import owner_of
from pippin.api.requests.body import Body

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
            fields.BATCH.check(body, self._rules)
            return self._batch(body, owner)

        batch = await self._state.read_json(request, read)
        await self._batches.create(owner, batch)
        return JSONResponse(batch.wire())

    async def _list(self, request: Request) -> Response:
        query = read_query(request, fields.BATCH_LIST, self._rules)
        found = [batch.wire() for batch in reversed(self._of(request).batches.batches())]
        return JSONResponse(page_of(found, query, limit=20, what="a batch"))

    async def _show(self, request: Request) -> Response:
        read_query(request, fields.NO_FIELDS, self._rules)
        return JSONResponse(self._batch_of(request).wire())

    async def _cancel(self, request: Request) -> Response:
        read_query(request, fields.NO_FIELDS, self._rules)
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
