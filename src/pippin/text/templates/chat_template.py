"""Renders chat templates to tokens and notes where messages end. Knows no model and no HTTP."""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

import jinja2

from pippin.errors import LoadError, RequestError
from pippin.text.templates.message_ends import MessageEnds
from pippin.text.templates.message_shape import Message, MessageShape, Tools
from pippin.text.templates.template_sandbox import BoundedTemplate, compile_bounded, time_limit
from pippin.text.tokenizer import Tokenizer, read_json

# A chat of many turns gets boundaries for its first and its last messages: those in between were
# last messages themselves a few turns ago, and each boundary costs a render.
NUM_FIRST_BOUNDARIES = 2
NUM_LAST_BOUNDARIES = 8
MAX_RENDERED_MESSAGES = 16_000  # for the boundaries of one chat, all renders together

RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# What a template raises when it meets messages that it was not written for.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
    MemoryError,
)


@dataclass(frozen=True)
class RenderedChat:
    text: str
    tokens: list[int]
    boundaries: list[int]  # token positions where messages end, ascending


class ChatTemplate:
    """A checkpoint's own template, run in the sandbox that transformers would use.

    Some checkpoints have another one for chats with tools (`tool_source`).
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        *,
        tool_source: str | None = None,
    ) -> None:
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._variables = dict(variables or {})
        self._template = _compile(self.source)
        self._tool_template = _compile(self.tool_source)

    @classmethod
    def load(cls, model_dir: Path, variables: Mapping[str, Any]) -> ChatTemplate | None:
        sources = _find_sources(model_dir)
        if "default" not in sources:
            return None
        return cls(sources["default"], variables, tool_source=sources.get("tool_use"))

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        return self._render(
            self._shape.apply(messages),
            tools,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        check: Callable[[str], None] = lambda text: None,
    ) -> RenderedChat:
        """The prompt's tokens, and those positions in it where messages end.

        `check` may refuse the rendered text before more is made of it. To continue the final
        message, the text is cut behind its content.
        """
        cut_mark = uuid4().hex if continue_final_message else None
        shown = messages if cut_mark is None else _with_cut_mark(messages, cut_mark)
        add_generation_prompt = add_generation_prompt and cut_mark is None
        render = partial(self._render, variables=variables)
        with time_limit():
            shaped = self._shape.apply(shown)
            text = render(shaped, tools, add_generation_prompt=add_generation_prompt)
            text = text if cut_mark is None else _before_mark(text, cut_mark)
            check(text)
            message_ends = MessageEnds(render, text, shaped, tools)
            prefixes = _prefixes(len(shaped), has_tools=bool(tools))
            ends = [message_ends.find(num_messages) for num_messages in prefixes]
        encoded = tokenizer.encode_rendered(text)
        boundaries = {_token_position(encoded.ends, end) for end in ends if end}
        return RenderedChat(text, encoded.ids, sorted(b for b in boundaries if b))

    @cached_property
    def _shape(self) -> MessageShape:
        return MessageShape.of(self._render)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        template = self._tool_template if tools else self._template
        try:
            return template.render(
                {
                    **self._variables,
                    **(variables or {}),
                    "messages": messages,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refused the messages: {str(error) or repr(error)}",
                param="messages",
            ) from error


def _compile(source: str) -> BoundedTemplate:
    try:
        return compile_bounded(source, filters=_FILTERS, functions=_FUNCTIONS)
    except (jinja2.TemplateError, RecursionError) as error:
        raise LoadError(f"the chat template does not compile: {error}") from error


def _prefixes(num_messages: int, *, has_tools: bool) -> list[int]:
    """How many messages to look for the end of; the end of none is that of the tools."""
    first = range(0 if has_tools else 1, min(NUM_FIRST_BOUNDARIES, num_messages) + 1)
    num_last = max(1, min(NUM_LAST_BOUNDARIES, MAX_RENDERED_MESSAGES // max(1, num_messages)))
    last = range(max(1, num_messages - num_last + 1), num_messages + 1)
    return sorted({*first, *last})


def _with_cut_mark(messages: Sequence[Message], cut_mark: str) -> list[Message]:
    """Marked, because templates trim a content and write it in the middle of their own text."""
    *before, final = messages
    return [*before, {**final, "content": final["content"] + cut_mark}]


def _before_mark(text: str, cut_mark: str) -> str:
    before, found, _ = text.partition(cut_mark)
    if not found:
        raise RequestError(
            "the model's chat template does not show the content of the final message, which can "
            "therefore not be continued; end the conversation with a user message",
            param="messages",
        )
    return before


def _token_position(ends: list[int], char: int) -> int:
    """How many tokens cover no more than the first `char` characters."""
    return bisect.bisect_right(ends, char)


def _find_sources(model_dir: Path) -> dict[str, str]:
    """Templates by name; most checkpoints have one without a name."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(model_dir / name).get("chat_template")
        if isinstance(template, list):
            return {entry["name"]: entry["template"] for entry in template}
        if template is not None:
            return {"default": str(template)}
    return {}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; prompts must not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


_FILTERS = {"tojson": _tojson}
_FUNCTIONS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
