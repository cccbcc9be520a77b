"""The members of a JSON object whose text was cut short. Knows no tool."""

from __future__ import annotations

import json
from typing import Any

from pippin.text.pieces import MAX_ARGUMENTS_DEPTH

_CLOSING = {"{": "}", "[": "]"}


def members_of(text: str) -> dict[str, Any]:
    """All that can be read, a string that was cut included; none of a text that is no object, or
    nested deeper than a call's arguments may be."""
    ends, open_at_comma, at_comma, in_string, escaped = "", "", 0, False, False
    for at, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in _CLOSING:
            ends = _CLOSING[character] + ends
            if len(ends) > MAX_ARGUMENTS_DEPTH:
                return {}
        elif character in "}]":
            ends = ends[1:]
        elif character == ",":
            at_comma, open_at_comma = at, ends
    whole = text[:-1] if escaped else text
    found = _read(whole + '"' * in_string + ends)
    if found is None:
        found = _read(text[:at_comma] + open_at_comma)
    return found or {}


def _read(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
