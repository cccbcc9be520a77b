"""What any dialect asks for, once it has been checked. Knows no JSON of any API and no tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pippin.types import SamplingParams


@dataclass(frozen=True)
class Options:
    """What all requests share. `params.max_tokens` means nothing yet: see `max_tokens`."""

    params: SamplingParams
    max_tokens: int | None  # None: as many as fit
    max_tokens_field: str
    priority: int
    stream: bool
    include_usage: bool
    timeout_s: float | None
    most_tokens: int | None  # that the server gives a reply
    max_schema_bytes: int  # of a grammar


@dataclass(frozen=True)
class ToolUse:
    """The functions that a reply may call, as templates want them, and whether it has to."""

    tools: tuple[dict[str, Any], ...] = ()  # {"type": "function", "function": {"name": ...}}
    forbidden: bool = False  # shown to the model, but not to be called now
    required: bool = False
    named: str | None = None  # the one to call
    parallel: bool = True  # several calls in one reply

    @property
    def allowed(self) -> tuple[dict[str, Any], ...]:
        """Those that the reply may call."""
        if self.forbidden:
            return ()
        if self.named is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] == self.named)

    @property
    def strict(self) -> bool:
        return any(tool["function"].get("strict") for tool in self.allowed)


@dataclass(frozen=True)
class ChatRequest:
    options: Options
    messages: list[dict[str, Any]]
    tool_use: ToolUse = field(default_factory=ToolUse)
    add_generation_prompt: bool = True
    reasoning_effort: str | None = None  # None: as the template has it
    template_variables: dict[str, Any] = field(default_factory=dict)
    # What the dialect calls them, for errors:
    messages_field: str = "messages"
    effort_field: str = "reasoning_effort"


@dataclass(frozen=True)
class CompletionRequest:
    options: Options
    prompts: list[str] | list[list[int]]
    echo: bool
