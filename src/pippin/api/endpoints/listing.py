"""Lists in pages, as OpenAI's clients ask for them. Knows no route."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from pippin.api.fields.table import FieldTable
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
