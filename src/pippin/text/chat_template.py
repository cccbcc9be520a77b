"""Renders chat templates to tokens and notes where messages end. Knows no model and no HTTP."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2

from pippin.errors import LoadError, RequestError
from pippin.text.template_sandbox import compile_bounded, time_limit
from pippin.text.tokenizer import Tokenizer, read_json

Message = Mapping[str, Any]

# A chat of many turns gets boundaries for its first and its last messages: those in between were
# last messages themselves a few turns ago, and each boundary costs a render.
NUM_FIRST_BOUNDARIES = 2
NUM_LAST_BOUNDARIES = 8

_PROBE: Message = {"role": "user", "content": "probe"}
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
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
)


@dataclass(frozen=True)
class RenderedChat:
    text: str
    tokens: list[int]
    boundaries: list[int]  # token positions where messages end, ascending


class ChatTemplate:
    """A checkpoint's own template, run in the sandbox that transformers would use."""

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        try:
            self._template = compile_bounded(source, filters=_FILTERS, functions=_FUNCTIONS)
        except (jinja2.TemplateError, RecursionError) as error:
            raise LoadError(f"the chat template does not compile: {error}") from error

    @classmethod
    def load(cls, model_dir: Path, variables: Mapping[str, Any]) -> ChatTemplate | None:
        source = _find_source(model_dir)
        return None if source is None else cls(source, variables)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            return self._template.render(
                {
                    **self._variables,
                    **(variables or {}),
                    "messages": [_with_reasoning_names(message) for message in messages],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt's tokens, and those positions in it where messages end."""
        with time_limit():
            text = self.render(
                messages, add_generation_prompt=add_generation_prompt, variables=variables
            )
            ends = {
                self._message_end(text, messages, n, variables) for n in _prefixes(len(messages))
            }
        encoded = tokenizer.encode_rendered(text)
        boundaries = {_token_position(encoded.ends, end) for end in ends if end}
        return RenderedChat(text, encoded.ids, sorted(b for b in boundaries if b))

    def _message_end(
        self,
        text: str,
        messages: Sequence[Message],
        num_messages: int,
        variables: Mapping[str, Any] | None,
    ) -> int | None:
        """Where the first `num_messages` end in `text`; None where that cannot be told.

        Some templates refuse a chat without a user message, and some write the last assistant
        message in another way. So the second attempt adds a user message and takes it off again.
        """
        head = messages[:num_messages]
        for tail in ([], [_PROBE]):
            try:
                prefix = self.render(
                    [*head, *tail], add_generation_prompt=False, variables=variables
                )
                suffix = (
                    self.render(tail, add_generation_prompt=False, variables=variables)
                    if tail
                    else ""
                )
            except RequestError:
                continue
            end = len(prefix) - len(suffix)
            if prefix.endswith(suffix) and text.startswith(prefix[:end]):
                return end
        return None


def _prefixes(num_messages: int) -> list[int]:
    first = range(1, min(NUM_FIRST_BOUNDARIES, num_messages) + 1)
    last = range(max(1, num_messages - NUM_LAST_BOUNDARIES + 1), num_messages + 1)
    return sorted({*first, *last})


def _token_position(ends: list[int], char: int) -> int | None:
    """How many tokens cover exactly the first `char` characters; None if a token straddles."""
    position = bisect.bisect_right(ends, char)
    return position if position and ends[position - 1] == char else None


def _with_reasoning_names(message: Message) -> dict[str, Any]:
    """Templates disagree on the name of a message's reasoning: give it every name."""
    found = (message[name] for name in _REASONING_NAMES if message.get(name) is not None)
    reasoning = next(found, None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _find_source(model_dir: Path) -> str | None:
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = read_json(model_dir / name).get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template is not None:
            return str(template)
    return None


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
