"""Parts of a message that are no text: a text takes their place. Knows no dialect's messages.

Clients send a history again in every turn, so a picture that were refused would end the session.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from pippin.api.requests.body import Body
from pippin.api.requests.content.image_size import describe_image
from pippin.errors import cut

MAX_NAME_CHARS = 200  # of a file's name or address, as the model sees it
_INDEX = re.compile(r"\[\d+\]")
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KINDS = {  # by the type of a part: what the model is shown
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "document": "document",
    "file": "file",
    "input_file": "file",
}
_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")


def text_in_place_of(part: Body) -> str:
    """The text of a file that has some; or what the part is, and that it was left out."""
    kind = part.required_string("type")
    if not _KIND.fullmatch(kind):
        raise part.wrong("type", "a name in lower case of at most 64 characters")
    if kind == "refusal":
        return part.string("refusal", "")
    if kind == "search_result":
        return _search_result(part)
    if (text := _plain_text(part)) is not None:
        return _titled(part, text)
    part.leniency.omit(_INDEX.sub("[]", part.path), kind)
    return _placeholder(part, _KINDS.get(kind, kind))


def _placeholder(part: Body, shown: str) -> str:
    data, media_type, where = _source(part)
    if shown == "image" and (described := describe_image(data) or _format_of(media_type)):
        return f"[image: {described} omitted]"
    name = " ".join((_name(part) or where)[: MAX_NAME_CHARS * 2].split())
    return f"[{shown} omitted: {cut(name, MAX_NAME_CHARS)}]" if name else f"[{shown} omitted]"


def _source(part: Body) -> tuple[str, str, str]:
    """Base64, its media type, and an address or id; each empty, if there is none."""
    for field in ("source", "image_url", "input_audio", "file", "video_url", "audio_url"):
        inner = part.get(field)
        if isinstance(inner, str):
            return _of_url(inner)
        if isinstance(inner, dict):
            return _of_object(inner)
    return _of_object({field: part.get(field) for field in part.fields()})


def _of_object(inner: dict[str, Any]) -> tuple[str, str, str]:
    for field in ("url", "file_url", "file_data", "data", "file_id"):
        if isinstance(value := inner.get(field), str):
            if field in ("data", "file_data") and not value.startswith("data:"):
                return value, _string(inner, "media_type"), ""
            return _of_url(value)
    return "", "", ""


def _of_url(url: str) -> tuple[str, str, str]:
    if not url.startswith("data:"):
        return "", "", url
    head, _, data = url.partition(",")
    return data, head[len("data:") : MAX_NAME_CHARS].partition(";")[0], ""


def _format_of(media_type: str) -> str:
    kind, _, format = media_type.partition("/")
    return format.upper() if kind == "image" and _KIND.fullmatch(format) else ""


def _name(part: Body) -> str:
    inner = part.get("file")
    named = inner if isinstance(inner, dict) else {}
    return _string(named, "filename") or next(
        (name for field in ("filename", "title") if isinstance(name := part.get(field), str)), ""
    )


def _plain_text(part: Body) -> str | None:
    """Of a document with text, or a file of a type that is text."""
    source = part.get("source")
    if isinstance(source, dict) and part.get("type") == "document":
        if source.get("type") == "text":
            return part.required_object("source").required_string("data")
        if source.get("type") == "content":
            return _texts(part.required_object("source"))
    data, media_type, _ = _source(part)
    if part.get("type") not in ("document", "file", "input_file"):
        return None
    if not data or not media_type.startswith(_TEXT_TYPES):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _search_result(part: Body) -> str:
    where = part.string("source", "")
    return "\n".join(filter(None, (part.string("title", ""), where, _texts(part))))


def _texts(body: Body) -> str:
    content = body.get("content")
    if isinstance(content, str):
        return content
    inner = body.objects("content", "a string or a list of blocks") if content else []
    return "\n".join(
        block.string("text", "") if block.get("type") == "text" else _inner_place(block)
        for block in inner
    )


def _inner_place(block: Body) -> str:
    kind = block.required_string("type")
    block.leniency.omit(_INDEX.sub("[]", block.path), kind)
    return _placeholder(block, _KINDS.get(kind, "part"))


def _titled(part: Body, text: str) -> str:
    name = _name(part)
    return f"{name}\n{text}" if name else text


def _string(fields: dict[str, Any], field: str) -> str:
    value = fields.get(field)
    return value if isinstance(value, str) else ""
