"""Stored responses: read again, listed, deleted. Knows no tokens and no engine."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.dialects.response_store import ResponseStore, ResponseStores
from pippin.api.fields.openai import STORED_ITEMS, STORED_RESPONSE
from pippin.api.fields.table import FieldTable
from pippin.api.http.access_control import owner_of
from pippin.api.http.http_errors import JSONResponse
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body

_LISTS = ("include", "include[]")  # as official clients spell a list


def read_query(request: Request, table: FieldTable, rules: RequestRules) -> Body:
    given = request.query_params
    fields: dict[str, Any] = {name: given[name] for name in given if name not in _LISTS}
    if included := [value for name in _LISTS for value in given.getlist(name)]:
        fields["include"] = included
    limit = fields.get("limit", "")
    if limit.removeprefix("-").isdecimal() and len(limit) < 10:
        fields["limit"] = int(limit)
    query = Body(fields)
    table.check(query, rules)
    return query


def page_of(items: list[dict[str, Any]], query: Body, *, limit: int, what: str) -> dict[str, Any]:
    """What follows `after`; `limit`: if the query has none."""
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise query.wrong("after", f"the id of {what}")
        items = items[ids.index(after) + 1 :]
    limit = query.get("limit", limit)
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


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
