"""Messages as one template wants them. Knows no tokens and no HTTP.

Templates disagree on names and on types. What cannot be had under every name at once (a call's
arguments are a mapping here and a text there) is found out by rendering both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
_PROBE_ID = "probe0000"  # nine letters and digits: some templates refuse any other id


def wants_text_arguments(render: Render) -> bool:
    """Whether a template writes a call's arguments as they are, if they are given as text.

    Then text is better: the prompt repeats what the model said, space for space, and the prefix
    cache holds it.
    """
    as_text = _render_call(render, json.dumps(_PROBE_ARGUMENTS))
    as_mapping = _render_call(render, _PROBE_ARGUMENTS)
    return as_text is not None and (as_mapping is None or as_text == as_mapping)


def _render_call(render: Render, arguments: Any) -> str | None:
    call = {
        "id": _PROBE_ID,
        "type": "function",
        "function": {"name": "probe", "arguments": arguments},
    }
    user = {"role": "user", "content": "probe"}
    try:
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        return render([user, reply], [_PROBE_TOOL])
    except RequestError:
        return None


def shaped(message: Message, *, text_arguments: bool) -> dict[str, Any]:
    """The message with what it says under every name, and its calls' arguments in one type."""
    result = _with_reasoning_names(message)
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [_shaped_call(call, text_arguments) for call in calls]
    return result


def _with_reasoning_names(message: Message) -> dict[str, Any]:
    found = (message[name] for name in _REASONING_NAMES if message.get(name) is not None)
    reasoning = next(found, None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _shaped_call(call: Mapping[str, Any], text_arguments: bool) -> dict[str, Any]:
    function = call["function"]
    convert = _as_text if text_arguments else _as_mapping
    arguments = convert(function.get("arguments", {}))
    return {**call, "function": {**function, "arguments": arguments}}


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
    return value if isinstance(value, dict) else arguments
