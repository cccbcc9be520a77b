"""A reply as OpenAI's response: items of reasoning, text and calls. Knows no request's fields."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pippin.api.dialects.block_stream import BlockStream
from pippin.api.dialects.dialect import DONE, cached_details, named_event
from pippin.api.dialects.event_template import HOLE, EventTemplate
from pippin.api.dialects.responses.item_forms import (
    CUSTOM,
    FUNCTION,
    MESSAGE,
    Item,
    ItemForm,
    shell_call,
)
from pippin.api.dialects.responses.reasoning import ReasoningForm
from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run_job import FoldedChoice
from pippin.api.requests.custom_tools import InputReader, input_of
from pippin.api.requests.tools import full_name
from pippin.errors import PippinError
from pippin.text.pieces import FoldedCall

Keep = Callable[[dict[str, Any]], bool]  # stores a response; whether it did


class ResponsesDialect(BlockStream):
    TEXT, REASONING, CALL, SHELL_CALL = "text", "reasoning", "call", "shell call"

    def __init__(
        self, job: Job, echo: dict[str, Any], keep: Keep, reasoning: ReasoningForm
    ) -> None:
        self._job = job
        self._echo = echo
        self._keep = keep
        self._reasoning = reasoning
        self._num_events = 0
        self._done: list[Item] = []
        # The one that grows, if `_open_kind` is set:
        self._form, self._item, self._text = MESSAGE, Item(), ""
        self._delta_event: EventTemplate | None = None
        self._input: InputReader | None = None  # of the custom tool that is called
        self._call = ("", "")  # of a shell tool: its id and name. It is sent when it is whole

    def open(self) -> bytes:
        created = self._response("in_progress", [])
        return b"".join(
            self._event(kind, response=created)
            for kind in ("response.created", "response.in_progress")
        )

    def close(self) -> bytes:
        ended = self._end(complete=self._finish != "length")
        whole = self._finished(self._finish, self._done)
        return ended + self._event(f"response.{whole['status']}", response=whole) + DONE

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        (choice,) = choices
        items: list[Item] = []
        if text := choice.text.reasoning:
            form = self._reasoning.item
            items.append(form.filled(form.new(), text) | self._reasoning.extra(text))
        if choice.text.content:
            items.append(MESSAGE.filled(MESSAGE.new(), choice.text.content))
        items += [self._whole_call(call) for call in choice.text.calls.values()]
        if items and choice.finish == "length":
            items[-1]["status"] = "incomplete"
        return self._finished(choice.finish, items)

    def error(self, error: PippinError) -> bytes:
        failed = self._response("failed", self._done) | {
            "error": {"code": "server_error", "message": error.message}
        }
        return (
            self._event("error", code=error.code, message=error.message, param=error.param)
            + self._event("response.failed", response=failed)
            + DONE
        )

    def _begin(self, kind: str) -> bytes:
        form = self._reasoning.item if kind == self.REASONING else MESSAGE
        return self._start(kind, form, form.new())

    def _begin_call(self, id: str, name: str) -> bytes:
        if name in self._job.tool_use.shells:
            self._call, self._text, self._open_kind = (id, name), "", self.SHELL_CALL
            self._input = None
            return b""
        form, item = self._new_call(id, name)
        self._input = InputReader() if form is CUSTOM else None
        return self._start(self.CALL, form, item)

    def _start(self, kind: str, form: ItemForm, item: Item) -> bytes:
        self._form, self._item, self._text, self._open_kind = form, item, "", kind
        self._delta_event = None
        added = self._event("response.output_item.added", output_index=len(self._done), item=item)
        return added + self._part_event("added")

    def _delta(self, text: str) -> bytes:
        if self._open_kind == self.SHELL_CALL:
            self._text += text
            return b""
        if self._input is not None and self._open_kind == self.CALL:
            text = self._input.feed(text)
        return self._text_delta(text)

    def _text_delta(self, text: str) -> bytes:
        if not text:
            return b""
        self._text += text
        if self._delta_event is None:
            data = {"delta": HOLE, **self._form.place, **self._form.delta}
            kind = f"response.{self._form.text_event}.delta"
            event = {"type": kind, "sequence_number": HOLE, **self._place, **data}
            self._delta_event = EventTemplate(named_event(event))
        return self._delta_event.fill(self._next_number(), text)

    def _end_call(self) -> bytes:
        rest = self._input.close() if self._input is not None else ""
        self._input = None
        return self._text_delta(rest) + self._end()

    def _end(self, *, complete: bool = True) -> bytes:
        if self._open_kind is None:
            return b""
        kind, self._open_kind = self._open_kind, None
        if kind == self.SHELL_CALL:
            return self._end_shell_call(complete=complete)
        form, text = self._form, self._text
        value = {"text" if form.index else form.text_field: text, **form.place, **form.delta}
        if form is FUNCTION:
            value["name"] = self._item["name"]
        done = self._item_event(f"response.{form.text_event}.done", **value)
        done += self._part_event("done")
        item = form.filled(self._item, text)
        if kind == self.REASONING:
            item |= self._reasoning.extra(text)
        return done + self._add(item | {"status": "completed" if complete else "incomplete"})

    def _end_shell_call(self, *, complete: bool) -> bytes:
        text, (id, name) = self._text, self._call
        item = shell_call(id, name, text) if complete else None
        if item is None:
            started = self._start(self.CALL, *self._new_call(id, name))
            return started + self._text_delta(text) + self._end(complete=complete)
        place = {"output_index": len(self._done)}
        events = self._event(
            "response.output_item.added", **place, item=item | {"status": "in_progress"}
        )
        for number, command in enumerate(item.get("action", {}).get("commands", ())):
            at = {"command": command, "command_index": number, **place}
            events += self._event("response.shell_call_command.added", **at)
            events += self._event("response.shell_call_command.done", **at)
        return events + self._add(item)

    def _add(self, item: Item) -> bytes:
        self._done.append(item)
        number = len(self._done) - 1
        return self._event("response.output_item.done", output_index=number, item=item)

    def _whole_call(self, call: FoldedCall) -> Item:
        if call.name in self._job.tool_use.shells:
            found = shell_call(call.id, call.name, call.arguments)
            if found is not None:
                return found
        form, item = self._new_call(call.id, call.name)
        return form.filled(item, input_of(call.arguments) if form is CUSTOM else call.arguments)

    def _new_call(self, call_id: str, name: str) -> tuple[ItemForm, Item]:
        form = CUSTOM if name in self._job.tool_use.custom else FUNCTION
        call: Item = {"call_id": call_id, "name": name}
        for namespace in self._job.tool_use.namespaces:
            if name.startswith(full_name(namespace, "")):
                call["name"] = name.removeprefix(full_name(namespace, ""))
                call["namespace"] = namespace
        return form, form.new(**call)

    def _part_event(self, what: str) -> bytes:
        form = self._form
        if not form.index:
            return b""
        part = form.part_of(self._text)
        return self._item_event(f"response.{form.part_event}.{what}", part=part, **form.place)

    def _item_event(self, kind: str, **data: Any) -> bytes:
        return self._event(kind, **self._place, **data)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._done)}

    def _event(self, kind: str, **data: Any) -> bytes:
        return named_event({"type": kind, "sequence_number": self._next_number(), **data})

    def _next_number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _finished(self, finish: str | None, items: list[Item]) -> dict[str, Any]:
        whole = self._response("incomplete" if finish == "length" else "completed", items)
        whole["usage"] = self._usage()
        if finish == "length":
            whole["incomplete_details"] = {"reason": "max_output_tokens"}
        whole["store"] = self._keep(whole)
        return whole

    def _response(self, status: str, items: list[Item]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": "response",
            "created_at": self._job.created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "model": self._job.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": items,
            "background": False,
            "service_tier": "default",
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None,
            **self._echo,
            **self._job.omitted,
        }

    def _usage(self) -> dict[str, Any]:
        job = self._job
        return {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": cached_details(job),
            "output_tokens": job.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": job.reasoning_tokens},
            "total_tokens": job.prompt_tokens + job.completion_tokens,
        }
