"""Tokens of a batch's replies, summed as they are stored. Knows no file and no line of the input.

Endpoints have two names for one count: chat completions have prompt_tokens, responses input_tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class ReplyUsage(msgspec.Struct, frozen=True):
    """`usage` of one reply of any endpoint."""

    prompt_tokens: int = 0
    prompt_tokens_details: _Details = _Details()
    completion_tokens: int = 0
    completion_tokens_details: _Details = _Details()
    input_tokens: int = 0
    input_tokens_details: _Details = _Details()
    output_tokens: int = 0
    output_tokens_details: _Details = _Details()


class BatchUsage(msgspec.Struct):
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, usage: ReplyUsage) -> None:
        read = (usage.prompt_tokens_details, usage.input_tokens_details)
        written = (usage.completion_tokens_details, usage.output_tokens_details)
        self.input_tokens += usage.prompt_tokens + usage.input_tokens
        self.cached_tokens += sum(details.cached_tokens for details in read)
        self.output_tokens += usage.completion_tokens + usage.output_tokens
        self.reasoning_tokens += sum(details.reasoning_tokens for details in written)

    def wire(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }
