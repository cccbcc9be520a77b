"""Messages of a conversation, with texts in the place of pictures and files."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from pippin.api.model_info import RequestRules
from pippin.api.requests.body import MAX_MESSAGES, Body, check_count, check_json_size
from pippin.api.requests.shared_fields import ROLES
from pippin.api.requests.tools import arguments_of
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
_HOLDERS = ("source", "image_url", "input_audio", "file", "video_url", "audio_url")
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
        name = _name(part)
        return f"{name}\n{text}" if name else text
    return _placeholder(part, kind)


def _placeholder(part: Body, kind: str, other: str | None = None) -> str:
    part.leniency.omit(_INDEX.sub("[]", part.path), kind)
    shown = _KINDS.get(kind, other or kind)
    _, media_type, where = _source(part)
    if shown == "image" and (format := _format_of(media_type)):
        return f"[image: {format} omitted]"
    name = " ".join((_name(part) or where)[: MAX_NAME_CHARS * 2].split())
    return f"[{shown} omitted: {cut(name, MAX_NAME_CHARS)}]" if name else f"[{shown} omitted]"


def _source(part: Body) -> tuple[str, str, str]:
    """Base64, its media type, and an address or id; each empty, if there is none."""
    held = [value for field in _HOLDERS if isinstance(value := part.get(field), str | dict)]
    inner = held[0] if held else {field: part.get(field) for field in part.fields()}
    if isinstance(inner, str):
        inner = {"url": inner}
    for field in ("url", "file_url", "file_data", "data", "file_id"):
        if value := _string(inner, field):
            break
    if not value.startswith("data:"):
        if field in ("data", "file_data"):
            return value, _string(inner, "media_type"), ""
        return "", "", value
    head, _, data = value.partition(",")
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
    found = (part.string("title", ""), part.string("source", ""), _texts(part))
    return "\n".join(filter(None, found))


def _texts(body: Body) -> str:
    content = body.get("content")
    if isinstance(content, str):
        return content
    inner = body.objects("content", "a string or a list of blocks") if content else []
    return "\n".join(
        block.string("text", "")
        if block.get("type") == "text"
        else _placeholder(block, block.required_string("type"), "part")
        for block in inner
    )


def _string(fields: dict[str, Any], field: str) -> str:
    value = fields.get(field)
    return value if isinstance(value, str) else ""


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


Message = dict[str, Any]
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")
_OLD_CALL = "function_call"
# Clients send a reply back as it was, with these empty.
_OFTEN_EMPTY = ("audio", "annotations", "refusal")
_FIELDS = frozenset({"role", "content", "tool_calls", "cache_control", _OLD_CALL, *_TEXTS})


def message_bodies(body: Body) -> list[Body]:
    expected = "a list of at least one message"
    bodies = body.objects("messages", expected)
    if not bodies:
        raise body.wrong("messages", expected)
    check_count(bodies, MAX_MESSAGES, "messages", "messages")
    return bodies


def parse_messages(body: Body) -> list[Message]:
    return [_parse_message(message) for message in message_bodies(body)]


def function_call(id: str, name: str, arguments: str | dict[str, Any]) -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def read_arguments(call: Body) -> str:
    """JSON that a template may want decoded: as deep and as large as a body may be."""
    arguments, name = call.string("arguments", "{}"), call.name("arguments")
    check_json_size(arguments.encode(), name, name)
    return arguments


def _parse_message(body: Body) -> Message:
    body.ignore_unknown(_FIELDS | {field for field in _OFTEN_EMPTY if not body.get(field)})
    if body.get(_OLD_CALL):
        raise body.unsupported(_OLD_CALL, "it is the old name of tool_calls")
    body.object("cache_control")
    body.require("role")
    role = body.one_of("role", ROLES)
    only_calls = role == "assistant" and not body.has("content")
    content = "" if only_calls else "".join(texts_of(body, "content"))
    message: Message = {"role": role, "content": content}
    message |= {field: text for field in _TEXTS if (text := body.string(field, None)) is not None}
    if body.has("tool_calls"):
        if role != "assistant":
            raise body.error("tool_calls", "must be in a message of the assistant")
        message["tool_calls"] = [_parse_tool_call(call) for call in body.objects("tool_calls")]
    return message


def _parse_tool_call(call: Body) -> Message:
    kind = call.one_of("type", ("function", "custom")) or "function"
    call.ignore_unknown({"id", "type", kind, "index"})
    called = call.required_object(kind)
    called.ignore_unknown({"name", "input" if kind == "custom" else "arguments"})
    name = called.required_string("name")
    if kind == "custom":
        arguments = arguments_of(called.string("input", ""))
    else:
        arguments = read_arguments(called)
    return function_call(call.string("id", ""), name, arguments)


def read_prediction(body: Body, rules: RequestRules) -> str:
    """Of a checked request; empty if it has none, or if nothing is done with it here."""
    given = body.object("prediction")
    if given is None:
        return ""
    text = "".join(texts_of(given, "content"))
    if not rules.model.takes_predictions:
        body.ignore("prediction", "this server has no drafts from texts (--speculate suffix)")
        return ""
    return text


# Claude Code's first line: its version, a checksum of the conversation, what started it.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
# How much is left of the context of a model of Anthropic's, counted down from turn to turn.
_TOTAL_TOKENS = re.compile(r"<total_tokens>[\w ,]{1,40}</total_tokens>\n?")

# Claude Code's last section of the system prompt: every process takes a new one, for a conversation
# that it resumes too. The date and CLAUDE.md are reminders in the first user message.
_SNAPSHOT = re.compile(r"\n(gitStatus: This is the git status at the start of .*)", re.DOTALL)


def normalise(messages: list[Message], rules: RequestRules, salt: bytes) -> list[Message]:
    """Without these lines, unless the server keeps them. A message of nothing else is left out.

    A snapshot becomes a reminder in a user's message: the one before the first reply, or the one
    with which the conversation was resumed. `salt`: of the request's prefixes.
    """
    if not rules.normalises_prompts:
        return messages
    kept = []
    for message in messages:
        if message["role"] == "system" and isinstance(text := message.get("content"), str):
            shown = _TOTAL_TOKENS.sub("", _BILLING.sub("", text, count=1))
            if text and not shown.strip():
                continue
            message = {**message, "content": shown}
        kept.append(message)
    return _with_late_snapshot(kept or messages, rules, salt)


def _with_late_snapshot(messages: list[Message], rules: RequestRules, salt: bytes) -> list[Message]:
    system, questions = messages[0], _questions(messages)
    text = system.get("content") if system["role"] == "system" else None
    found = _SNAPSHOT.search(text) if isinstance(text, str) else None
    if text is None or found is None or not questions:
        return messages
    prompt = {**system, "content": text[: found.start()].rstrip("\n")}
    shown = [prompt, *messages[1:]]
    digests = _digests(shown, questions, rules.owner + salt)
    for number, snapshot in rules.snapshots.place(digests, found[1].strip()):
        asked = shown[questions[number]]
        reminder = f"<system-reminder>\n{snapshot}\n</system-reminder>"
        shown[questions[number]] = {**asked, "content": f"{asked['content']}\n\n{reminder}"}
    return shown


def _questions(messages: Sequence[Message]) -> list[int]:
    """Of the user's messages the last one before the first reply, and all behind that reply."""
    roles = [message["role"] for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    users = [number for number, role in enumerate(roles) if role == "user"]
    first = [number for number in users if number < end][-1:]
    return first and first + [number for number in users if number > end]


def _digests(messages: Sequence[Message], ends: Sequence[int], key: bytes) -> list[bytes]:
    """Of the conversation up to and with each of these messages."""
    found, digest, known_ends = [], hashlib.blake2b(key, digest_size=32), set(ends)
    for number, message in enumerate(messages[: ends[-1] + 1]):
        text = msgspec.json.encode(message)
        digest.update(len(text).to_bytes(8, "big") + text)
        if number in known_ends:
            found.append(digest.digest())
    return found
