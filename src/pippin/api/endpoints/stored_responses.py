"""Stored responses: read again, listed, deleted. And what all queries and lists have in common."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pippin.api.dialects.response_store import ResponseStore
from pippin.api.endpoints.app_state import AppState
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


def page_of(items: list[dict[str, Any]], query: Body, *, limit: int, what: str) -> Response:
    """What follows `after`; `limit`: if the query has none."""
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise query.wrong("after", f"the id of {what}")
        items = items[ids.index(after) + 1 :]
    limit = query.get("limit", limit)
    page = items[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


async def show_response(state: AppState, request: Request) -> Response:
    return JSONResponse(_stored(state, request).get(request.path_params["id"]).response())


async def delete_response(state: AppState, request: Request) -> Response:
    id = request.path_params["id"]
    _stored(state, request).delete(id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def list_input_items(state: AppState, request: Request) -> Response:
    items = _stored(state, request).get(request.path_params["id"]).turn.input_items()
    if request.state.query.get("order", "desc") == "desc":
        items.reverse()
    return page_of(items, request.state.query, limit=20, what="an item of this response")


def _stored(state: AppState, request: Request) -> ResponseStore:
    return state.stored.of(owner_of(request.scope))
