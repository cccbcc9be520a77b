"""Removes what agents write into system messages for their vendor alone. Knows no dialect.

Each of these lines differs between conversations or turns and stands near the front of a prompt, so
that a cached prefix ends there. Nothing that a model could use is removed. A snapshot, which it
could use, is moved to the question with which it was first sent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from pippin.api.model_info import RequestRules

Message = dict[str, Any]

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
