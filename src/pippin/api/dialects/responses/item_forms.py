"""How items of a response are written: their fields, their parts, the names of their events.

Knows no order of events, and no request.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pippin.api.requests.shell_tools import SHELL_TOOLS, call_fields

Item = dict[str, Any]


@dataclass(frozen=True)
class ItemForm:
    """An item that has one text."""

    type: str
    prefix: str  # of ids
    text_field: str  # that has the text, or its one part
    text_event: str
    index: str = ""  # of the part, in its events; "": the text is in no part
    part_type: str = ""
    part_event: str = "content_part"
    empty: Mapping[str, Any] = field(default_factory=dict)  # what it has besides
    part: Mapping[str, Any] = field(default_factory=dict)  # the same of its part
    delta: Mapping[str, Any] = field(default_factory=dict)  # and of its deltas

    def new(self, **fields: Any) -> Item:
        own: Item = {self.text_field: [] if self.index else ""}
        started = {"id": new_id(self.prefix), "type": self.type, "status": "in_progress"}
        return {**started, **self.empty, **own, **fields}

    def filled(self, item: Item, text: str) -> Item:
        value = [self.part_of(text)] if self.index else text
        return item | {self.text_field: value, "status": "completed"}

    def part_of(self, text: str) -> Item:
        return {"type": self.part_type, "text": text, **self.part}

    @property
    def place(self) -> Item:
        return {self.index: 0} if self.index else {}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


MESSAGE = ItemForm(
    *("message", "msg", "content", "output_text", "content_index", "output_text"),
    empty={"role": "assistant"},
    part={"annotations": [], "logprobs": []},
    delta={"logprobs": []},
)
REASONING = ItemForm(
    *("reasoning", "rs", "content", "reasoning_text", "content_index", "reasoning_text"),
    empty={"summary": []},
)
SUMMARY = ItemForm(  # reasoning, where the client asked for a summary of it
    *("reasoning", "rs", "summary", "reasoning_summary_text", "summary_index", "summary_text"),
    part_event="reasoning_summary_part",
)
FUNCTION = ItemForm("function_call", "fc", "arguments", "function_call_arguments")
CUSTOM = ItemForm("custom_tool_call", "ctc", "input", "custom_tool_call_input")


def shell_call(call_id: str, name: str, arguments: str) -> Item | None:
    """A call of a shell tool. None: these are not its arguments, and it is a function's call."""
    fields = call_fields(name, arguments)
    if fields is None:
        return None
    known = {"id": new_id(SHELL_TOOLS[name].prefix), "call_id": call_id, "status": "completed"}
    return {**known, **fields}
