"""Content of a message: a string, or a list of parts of text. Knows no dialect."""

from __future__ import annotations

from collections.abc import Collection

from pippin.api.requests.body import Body

TEXT = ("text",)
UNREAD = ("cache_control",)  # every prefix is cached


def texts_of(
    body: Body, field: str, kinds: Collection[str] = TEXT, unread: Collection[str] = UNREAD
) -> list[str]:
    value = body.get(field)
    if isinstance(value, str):
        return [value]
    parts = body.objects(field, "a string or a list of text parts")
    return [text_of(part, kinds, unread) for part in parts]


def text_of(part: Body, kinds: Collection[str] = TEXT, unread: Collection[str] = UNREAD) -> str:
    """`kinds`: types of parts with text; `unread`: other members that a part may have."""
    if part.require("type") not in kinds:
        raise part.unsupported("type", "only text parts are supported")
    part.check_known({"type", "text", *unread})
    part.object("cache_control")
    return part.required_string("text")
