"""Content of a message: a string, or a list of parts, as texts. Knows no dialect."""

from __future__ import annotations

from pippin.api.requests.body import Body
from pippin.api.requests.content.omitted_parts import text_in_place_of

TEXT = ("text", "input_text", "output_text")
# As replies carry them, and a hint, since every prefix is cached.
_UNREAD = frozenset(
    {"type", "text", "cache_control", "citations", "annotations", "logprobs", "id", "status"}
)


def texts_of(body: Body, field: str) -> list[str]:
    value = body.get(field)
    if isinstance(value, str):
        return [value]
    return [text_of(part) for part in body.objects(field, "a string or a list of parts")]


def text_of(part: Body) -> str:
    """Parts of other types have a text in their place."""
    if part.is_foreign("type", TEXT):
        return text_in_place_of(part)
    part.ignore_unknown(_UNREAD)
    part.object("cache_control")
    return part.required_string("text")
