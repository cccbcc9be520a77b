"""Removes what agents write into system messages for their vendor alone. Knows no dialect.

Each of these lines differs between conversations or turns and stands near the front of a prompt, so
that a cached prefix ends there. Nothing that a model could use is removed. A snapshot, which it
could use, is moved behind what does not change.
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

# Claude Code's last section of the system prompt: every process takes a new one, for a conversation
# that it resumes too. The date and CLAUDE.md are reminders in the first user message.
_SNAPSHOT = re.compile(r"\n(gitStatus: This is the git status at the start of .*)", re.DOTALL)


def normalise(messages: list[Message], rules: RequestRules) -> list[Message]:
    """Without these lines, unless the server keeps them. A message of nothing else is left out.

    A snapshot becomes a reminder in the user's message before the first reply.
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
    return _with_late_snapshot(kept or messages)


def _with_late_snapshot(messages: list[Message]) -> list[Message]:
    system, roles = messages[0], [message["role"] for message in messages]
    first = roles[: roles.index("assistant")] if "assistant" in roles else roles
    text = system.get("content") if system["role"] == "system" else None
    found = _SNAPSHOT.search(text) if isinstance(text, str) else None
    if text is None or found is None or "user" not in first:
        return messages
    last = max(i for i, role in enumerate(first) if role == "user")
    asked = messages[last]
    reminder = f"<system-reminder>\n{found[1].strip()}\n</system-reminder>"
    moved = {**asked, "content": f"{asked['content']}\n\n{reminder}"}
    prompt = {**system, "content": text[: found.start()].rstrip("\n")}
    return [prompt, *messages[1:last], moved, *messages[last + 1 :]]
