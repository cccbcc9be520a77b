"""A request of any dialect, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pippin.api.requests.body import Leniency
from pippin.types import GrammarPart, SamplingParams


@dataclass(frozen=True)
class Options:
    """What all requests share. `params.max_tokens` means nothing yet: see `max_tokens`."""

    params: SamplingParams
    max_tokens: int | None  # None: as many as fit
    max_tokens_field: str
    priority: int
    salt: bytes  # a digest, of what separates its prefixes from those of others; b"": none
    stream: bool
    include_usage: bool
    timeout_s: float | None
    most_tokens: int | None  # that the server gives a reply
    max_schema_bytes: int  # of a grammar
    kept_tokens: int | None = None  # the last ones of a prompt; -1: as many as fit
    add_special_tokens: bool | None = None  # the tokenizer's own; None: as the dialect does
    keep_alive_s: float | None = None  # for which its model stays loaded


@dataclass(frozen=True)
class ToolUse:
    """The functions that a reply may call, as templates want them, and whether it has to."""

    tools: tuple[dict[str, Any], ...] = ()  # {"type": "function", "function": {"name": ...}}
    forbidden: bool = False  # shown to the model, but not to be called now
    required: bool = False
    only: frozenset[str] | None = None  # those that may be called; None: all
    parallel: bool = True  # several calls in one reply
    # Custom tools, which are shown as functions of one text, and what the text must look like:
    custom: Mapping[str, GrammarPart | None] = field(default_factory=dict)
    namespaces: frozenset[str] = frozenset()  # whose tools are shown as `namespace.name`
    shells: frozenset[str] = frozenset()  # functions that stand for tools of `shell_tools.py`
    deferred: frozenset[str] = frozenset()  # described in the conversation

    @property
    def listed(self) -> tuple[dict[str, Any], ...]:
        """Those that the prompt begins with."""
        return tuple(tool for tool in self.tools if tool["function"]["name"] not in self.deferred)

    @property
    def allowed(self) -> tuple[dict[str, Any], ...]:
        if self.forbidden:
            return ()
        if self.only is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool["function"]["name"] in self.only)

    @property
    def grammars(self) -> tuple[GrammarPart, ...]:
        """Those of custom tools that the reply may call."""
        names = [tool["function"]["name"] for tool in self.allowed]
        return tuple(found for name in names if (found := self.custom.get(name)) is not None)

    @property
    def strict(self) -> bool:
        """Whether some call's arguments have a schema or a grammar to obey."""
        functions = [tool["function"] for tool in self.allowed]
        return any(f.get("strict") or self.custom.get(f["name"]) for f in functions)

    @property
    def is_free(self) -> bool:
        """Whether a reply may call any tool, in any way, or none."""
        all_allowed = len(self.allowed) == len(self.tools)
        return all_allowed and self.parallel and not self.required and not self.strict


@dataclass(frozen=True)
class ChatRequest:
    options: Options
    messages: list[dict[str, Any]]
    tool_use: ToolUse = field(default_factory=ToolUse)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None  # None: as the template has it
    template_variables: dict[str, Any] = field(default_factory=dict)
    previous_tokens: tuple[int, ...] = ()  # that precede the conversation
    prediction: str = ""  # the reply that the client expects
    # What the dialect calls them, for errors:
    messages_field: str = "messages"
    effort_field: str = "reasoning_effort"
    leniency: Leniency = field(default_factory=Leniency)


@dataclass(frozen=True)
class Gap:
    """The reply is between two texts of a file; its prompt is the first."""

    suffix: str
    files: tuple[tuple[str, str], ...] | None = None  # others, by name; None: as if there were none
    # What the dialect calls them, for errors:
    prefix_field: str = "prompt"
    suffix_field: str = "suffix"
    files_field: str = ""


@dataclass(frozen=True)
class CompletionRequest:
    options: Options
    prompts: list[str] | list[list[int]]
    echo: bool = False
    leniency: Leniency = field(default_factory=Leniency)
    gap: Gap | None = None
