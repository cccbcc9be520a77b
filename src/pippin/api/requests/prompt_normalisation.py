"""Removes what agents write into system messages for their vendor alone. Knows no dialect.

Each of these lines differs between conversations or turns and stands near the front of a prompt, so
that a cached prefix ends there. Nothing that a model could use is removed.
"""

from __future__ import annotations

import re
from typing import Any

from pippin.api.model_info import RequestRules

Message = dict[str, Any]

# Claude Code's first line: its version, a checksum of the conversation, what started it.
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
# How much is left of the context of a model of Anthropic's, counted down from turn to turn.
_TOTAL_TOKENS = re.compile(r"<total_tokens>[\w ,]{1,40}</total_tokens>\n?")


def normalise(messages: list[Message], rules: RequestRules) -> list[Message]:
    """Without these lines, unless the server keeps them. A message of nothing else is left out."""
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
    return kept or messages
