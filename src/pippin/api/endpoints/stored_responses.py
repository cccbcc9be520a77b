"""Stored responses: read again, listed, deleted. Knows no tokens and no engine."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.dialects.responses.response_store import ResponseStore, ResponseStores
from pippin.api.endpoints.listing import page_of, read_query
from pippin.api.fields.openai import STORED_ITEMS, STORED_RESPONSE
from pippin.api.fields.table import FieldTable
from pippin.api.http.http_errors import JSONResponse
from pippin.api.http.keys import owner_of
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body

RESPONSE_PATH = "/v1/responses/{id}"
ITEMS_PATH = f"{RESPONSE_PATH}/input_items"


class StoredResponses:
    def __init__(self, stored: ResponseStores, rules: RequestRules) -> None:
        self._stored = stored
        self._rules = rules

    def routes(self) -> list[Route]:
        return [
            Route(RESPONSE_PATH, self._show, methods=["GET"]),
            Route(RESPONSE_PATH, self._delete, methods=["DELETE"]),
            Route(ITEMS_PATH, self._list_items, methods=["GET"]),
        ]

    async def _show(self, request: Request) -> Response:
        self._query(request, STORED_RESPONSE)
        return JSONResponse(self._of(request).get(request.path_params["id"]).response())

    async def _delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._query(request, FieldTable({}))
        self._of(request).delete(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def _list_items(self, request: Request) -> Response:
        query = self._query(request, STORED_ITEMS)
        items = self._of(request).get(request.path_params["id"]).turn.input_items()
        if query.get("order", "desc") == "desc":
            items.reverse()
        page = page_of(items, query, limit=20, what="an item of this response")
        return JSONResponse(page)

    def _of(self, request: Request) -> ResponseStore:
        return self._stored.of(owner_of(request.scope))

    def _query(self, request: Request, table: FieldTable) -> Body:
        return read_query(request, table, self._rules)
