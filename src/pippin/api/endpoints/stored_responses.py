"""Stored responses: read again, listed, deleted. Knows no tokens and no engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pippin.api.dialects.responses.response_request import INCLUDED
from pippin.api.dialects.responses.response_store import ResponseStore, ResponseStores
from pippin.api.http.access_control import owner_of
from pippin.api.http.http_errors import JSONResponse
from pippin.api.requests.body import Body
from pippin.errors import RequestError, UnsupportedField, cut

PATH = "/v1/responses/{id}"
ITEMS_PATH = f"{PATH}/input_items"
MAX_LISTED = 100
ORDERS = ("asc", "desc")
INCLUDE = ("include", "include[]")  # as official clients spell a list
RESPONSE_QUERY = (*INCLUDE, "stream")
ITEMS_QUERY = (*INCLUDE, "limit", "order", "after")


def stored_routes(stored: ResponseStores) -> list[Route]:
    endpoint = StoredResponses(stored)
    return [
        Route(PATH, endpoint.show, methods=["GET"]),
        Route(PATH, endpoint.delete, methods=["DELETE"]),
        Route(ITEMS_PATH, endpoint.list_items, methods=["GET"]),
    ]


class StoredResponses:
    def __init__(self, stored: ResponseStores) -> None:
        self._stored = stored

    async def show(self, request: Request) -> Response:
        query = _query(request, RESPONSE_QUERY)
        if query.get("stream") not in (None, "false"):
            raise UnsupportedField("a stored response is told whole", param="stream")
        stored = self._of(request).get(request.path_params["id"])
        return JSONResponse(stored.response())

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        _query(request, ())
        self._of(request).delete(id)
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    async def list_items(self, request: Request) -> Response:
        query = _query(request, ITEMS_QUERY)
        limit = query.integer("limit", 1, MAX_LISTED, 20)
        order = query.one_of("order", ORDERS) or "desc"
        stored = self._of(request).get(request.path_params["id"])
        items = stored.turn.input_items()
        if order == "desc":
            items.reverse()
        if (after := query.string("after", None)) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise RequestError(f"after: there is no item {cut(after)!r} here", param="after")
            items = items[ids.index(after) + 1 :]
        return JSONResponse(_page(items, limit))

    def _of(self, request: Request) -> ResponseStore:
        return self._stored.of(owner_of(request.scope))


def _page(items: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }


def _query(request: Request, known: Iterable[str]) -> Body:
    """A query's fields, numbers as such. What is asked for besides is refused."""
    fields: dict[str, Any] = dict(request.query_params)
    if fields.get("limit", "").removeprefix("-").isdecimal() and len(fields["limit"]) < 10:
        fields["limit"] = int(fields["limit"])
    query = Body(fields)
    query.check_known(known)
    for value in (value for name in INCLUDE for value in request.query_params.getlist(name)):
        if value not in INCLUDED:
            raise UnsupportedField(f"include: {cut(value)!r} is not supported", param="include")
    return query
