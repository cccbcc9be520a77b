"""The text of a request's prompt, by which a router compares prefixes. Knows no dialect's rules.

The next turn of a conversation begins with the text of the turn before it: messages are taken one
by one, as JSON, in the order in which chat templates have them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pippin.api.http.read_body import decode_body
from pippin.errors import RequestError

BEFORE = ("tools", "system", "instructions")
PROMPTS = ("messages", "input", "prompt")
MAX_CHARS = 262_144  # routers keep it; what follows decides little


def prompt_text(body: bytes | bytearray) -> str:
    """Empty: the request has none, or cannot be read, which a replica will report."""
    try:
        fields = decode_body(body)
    except RequestError:
        return ""
    if not isinstance(fields, dict):
        return ""
    prompt = next((fields[name] for name in PROMPTS if fields.get(name)), None)
    if prompt is None:
        return ""
    parts = [_text(fields[name]) for name in BEFORE if fields.get(name)]
    parts += map(_text, prompt) if isinstance(prompt, list) else [_text(prompt)]
    return "\n".join(parts)[:MAX_CHARS]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
