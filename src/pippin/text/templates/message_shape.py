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
    user_drops_reasoning: bool = False  # a user message behind a tool's result: that before it

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
            user_drops_reasoning=_drops_reasoning(render, shape._arguments(_PROBE_ARGUMENTS)),
        )

    def apply(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Agents send system messages in mid-conversation. For a template that refuses them:

        - those before the first reply join the system prompt, which conversations share;
        - those behind a tool's result join that, where a user message would be taken for the next
          question, and the reasoning before it would be dropped in the middle of a turn;
        - all others become user messages.
        """
        shaped: list[dict[str, Any]] = []
        joined: list[list[str]] = []  # the contents of those that become one message, for each
        ordered = _system_first(messages) if self.one_system else messages
        for message in map(self._message, ordered):
            last = shaped[-1] if shaped else None
            text = self._joined_text(last, message)
            if text is None and self.one_system and last and message["role"] == "system":
                message["role"] = "user"
                text = self._joined_text(last, message)
            if text is None:
                shaped.append(message)
                joined.append([])
            else:
                joined[-1].append(text)
        for message, more in zip(shaped, joined, strict=True):
            if more:
                message["content"] = "\n\n".join([message["content"], *more])
        return shaped

    def _joined_text(self, last: Message | None, message: Message) -> str | None:
        """What `message` adds to the one before it; None if it is a message of its own."""
        text = message.get("content")
        if last is None or not isinstance(last.get("content"), str) or not isinstance(text, str):
            return None
        match last["role"], message["role"]:
            case ("system", "system") if self.one_system:
                return text
            case ("user", "user") if self.one_user:
                return text
            case ("tool", "system") if self.one_system and self.user_drops_reasoning:
                return f"<system-reminder>\n{text.strip()}\n</system-reminder>"
        return None

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
    return try_render(render, _turn(arguments, content, reasoning), [_PROBE_TOOL])


def _drops_reasoning(render: Render, arguments: Any) -> bool:
    """Whether a user message behind a tool's result has the reasoning before it dropped."""
    turn = _turn(arguments, "", _MARK)
    turn.append({"role": "tool", "tool_call_id": _PROBE_ID, "content": "probe"})
    before = try_render(render, turn, [_PROBE_TOOL])
    after = try_render(render, [*turn, {"role": "user", "content": "probe"}], [_PROBE_TOOL])
    return before is not None and _MARK in before and after is not None and _MARK not in after


def _turn(arguments: Any, content: str, reasoning: str | None) -> list[Message]:
    function = {"name": "probe", "arguments": arguments}
    reply = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": _PROBE_ID, "type": "function", "function": function}],
    }
    if reasoning is not None:
        reply |= dict.fromkeys(_REASONING_NAMES, reasoning)
    return [{"role": "user", "content": "probe"}, reply]


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


def _system_first(messages: Sequence[Message]) -> list[Message]:
    """System messages before the first reply stand before the user's."""
    replies = (i for i, message in enumerate(messages) if message["role"] == "assistant")
    num_first = next(replies, len(messages))
    first = sorted(messages[:num_first], key=lambda message: message["role"] != "system")
    return [*first, *messages[num_first:]]


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
