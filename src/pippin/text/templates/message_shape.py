"""Messages in the shape that one template expects. Knows no tokens and no HTTP.

Templates differ in names and in types. Where a message cannot have every shape at once (a call's
arguments are a mapping for one template and text for another), each is tried by rendering it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pippin.errors import RequestError

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Sequence[Message], Tools | None], str]

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PROBE_ARGUMENTS = {"probe": "value"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe": {"type": "string"}}},
    },
}
_MARK = "probe-mark"
_PROBE_ID = "probe0000"  # nine letters and digits: some templates refuse any other id


@dataclass(frozen=True)
class MessageShape:
    # Text is better where a template writes it unchanged: the prompt then repeats the model's own
    # tokens, which the prefix cache has.
    text_arguments: bool
    one_text_beside_calls: bool  # a turn with calls may have reasoning or content, not both
    one_system: bool = False  # a system message stands at the beginning, or not at all
    one_user: bool = False  # no two user messages in a row

    @classmethod
    def of(cls, render: Render) -> MessageShape:
        as_text = _try_call(render, json.dumps(_PROBE_ARGUMENTS))
        as_mapping = _try_call(render, _PROBE_ARGUMENTS)
        text_arguments = as_text is not None and as_mapping in (None, as_text)
        shape = cls(text_arguments, one_text_beside_calls=False)
        with_both = _try_call(render, shape._arguments(_PROBE_ARGUMENTS), "probe", "probe")
        return replace(
            shape,
            one_text_beside_calls=with_both is None,
            one_system=_MARK
            not in (_try_roles(render, "user", "assistant", "user", "system") or ""),
            one_user=_try_roles(render, "user", "user") is None,
        )

    def apply(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Agents send system messages in mid-conversation. For a template that refuses them they
        become user messages: no content is left out."""
        shaped: list[dict[str, Any]] = []
        joined: list[list[str]] = []  # the contents of those that become one message, for each
        for message in map(self._message, messages):
            last = shaped[-1] if shaped else None
            if self.one_system and message["role"] == "system" and last is not None:
                message["role"] = "system" if last["role"] == "system" else "user"
            only_one = message["role"] == "system" and self.one_system
            only_one |= message["role"] == "user" and self.one_user
            if only_one and last is not None and _can_join(last, message):
                joined[-1].append(message["content"])
            else:
                shaped.append(message)
                joined.append([])
        for message, more in zip(shaped, joined, strict=True):
            if more:
                message["content"] = "\n\n".join([message["content"], *more])
        return shaped

    def _message(self, message: Message) -> dict[str, Any]:
        """With its reasoning under every name and its calls as they should be."""
        result = _with_reasoning_names(message)
        if calls := message.get("tool_calls"):
            result["tool_calls"] = [self._call(call) for call in calls]
            if self.one_text_beside_calls and result.get("thinking") and result.get("content"):
                both = f"{result['thinking']}\n\n{result['content']}"
                result |= {"content": "", **dict.fromkeys(_REASONING_NAMES, both)}
        return result

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = self._arguments(function.get("arguments", {}))
        return {**call, "function": {**function, "arguments": arguments}}

    def _arguments(self, arguments: Any) -> Any:
        return _as_text(arguments) if self.text_arguments else _as_mapping(arguments)


def _try_call(
    render: Render, arguments: Any, content: str = "", reasoning: str | None = None
) -> str | None:
    """A rendered turn with a call; None if the template refuses it."""
    function = {"name": "probe", "arguments": arguments}
    reply = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": _PROBE_ID, "type": "function", "function": function}],
    }
    if reasoning is not None:
        reply |= dict.fromkeys(_REASONING_NAMES, reasoning)
    return try_render(render, [{"role": "user", "content": "probe"}, reply], [_PROBE_TOOL])


def _try_roles(render: Render, *roles: str) -> str | None:
    """Rendered messages of these roles, the last of them marked; None if refused."""
    *before, last = [{"role": role, "content": "probe"} for role in roles]
    return try_render(render, [*before, {**last, "content": _MARK}], None)


def try_render(render: Render, messages: Sequence[Message], tools: Tools | None) -> str | None:
    """None if the template refuses the messages."""
    try:
        return render(messages, tools)
    except RequestError:
        return None


def _can_join(last: Message, message: Message) -> bool:
    contents = (last.get("content"), message.get("content"))
    return last["role"] == message["role"] and all(isinstance(each, str) for each in contents)


def _with_reasoning_names(message: Message) -> dict[str, Any]:
    found = (message[name] for name in _REASONING_NAMES if message.get(name) is not None)
    reasoning = next(found, None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _as_mapping(arguments: Any) -> Any:
    """What is no object stays text: the template may know what to do with it."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    return _without_halves(value) if "\\ud" in arguments.lower() else value


def _without_halves(value: Any) -> Any:
    """Half of a surrogate pair is valid JSON, and no character: no tokenizer reads it."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(text.decode("utf-16", "replace"))
