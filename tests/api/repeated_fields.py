"""Fields that have no effect and that several bodies have in common: one body shows what all do."""

from __future__ import annotations

from itertools import takewhile

from pippin.api.app import ENDPOINTS
from pippin.api.requests.fields import Unused

TABLES = {row.path: row.body for row in ENDPOINTS if row.body is not None}


def repeated_fields(path: str) -> set[str]:
    """Those that a body before this one has: one object checks them, and nothing reads them."""
    table = TABLES[path]
    before = takewhile(lambda other: other is not table, TABLES.values())
    known = {(name, id(kind)) for other in before for name, kind in other.fields.items()}
    return {
        name
        for name, kind in table.fields.items()
        if isinstance(kind, Unused) and (name, id(kind)) in known
    }
