"""A reply as OpenAI's response: items of reasoning, text and calls. Knows no request's fields."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from pippin.api.dialects.block_stream import BlockStream
from pippin.api.dialects.dialect import cached_details, named_event
from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run_job import FoldedChoice
from pippin.api.requests.custom_tools import InputReader, input_of
from pippin.api.requests.tools import full_name
from pippin.errors import PippinError

Item = dict[str, Any]
Keep = Callable[[dict[str, Any]], bool]  # stores a response; whether it did


FUNCTION, CUSTOM = "function_call", "custom_tool_call"
_PREFIXES = {"message": "msg", "reasoning": "rs", FUNCTION: "fc", CUSTOM: "ctc"}  # of ids
_TEXT_FIELDS = {FUNCTION: "arguments", CUSTOM: "input"}  # of calls
_TEXT_EVENTS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    FUNCTION: "function_call_arguments",
    CUSTOM: "custom_tool_call_input",
}


class ResponsesDialect(BlockStream):
    TEXT, REASONING = "message", "reasoning"

    def __init__(self, job: Job, echo: dict[str, Any], keep: Keep) -> None:
        self._job = job
        self._echo = echo
        self._keep = keep
        self._num_events = 0
        self._done: list[Item] = []
        self._item: Item = {}  # the one that grows, if `_open_kind` is set
        self._text = ""  # of it, so far
        self._input: InputReader | None = None  # of the custom tool that is called

    def open(self) -> bytes:
        created = self._response("in_progress", [])
        return b"".join(
            self._event(kind, response=created)
            for kind in ("response.created", "response.in_progress")
        )

    def close(self) -> bytes:
        ended = self._end(complete=self._finish != "length")
        whole = self._finished(self._finish, self._done)
        return ended + self._event(f"response.{whole['status']}", response=whole)

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        (choice,) = choices
        items: list[Item] = []
        if choice.text.reasoning:
            items.append(_filled(_new_item("reasoning"), choice.text.reasoning))
        if choice.text.content:
            items.append(_filled(_new_item("message"), choice.text.content))
        for call in choice.text.calls.values():
            item = self._new_call(call.id, call.name)
            is_custom = item["type"] == CUSTOM
            items.append(_filled(item, input_of(call.arguments) if is_custom else call.arguments))
        if items and choice.finish == "length":
            items[-1]["status"] = "incomplete"
        return self._finished(choice.finish, items)

    def error(self, error: PippinError) -> bytes:
        failed = self._response("failed", self._done) | {
            "error": {"code": "server_error", "message": error.message}
        }
        return self._event(
            "error", code=error.code, message=error.message, param=error.param
        ) + self._event("response.failed", response=failed)

    def _begin(self, kind: str) -> bytes:
        return self._start(_new_item(kind))

    def _begin_call(self, id: str, name: str) -> bytes:
        item = self._new_call(id, name)
        self._input = InputReader() if item["type"] == CUSTOM else None
        return self._start(item)

    def _start(self, item: Item) -> bytes:
        self._item, self._text, self._open_kind = item, "", item["type"]
        added = self._event("response.output_item.added", output_index=len(self._done), item=item)
        if item["type"] in _TEXT_FIELDS:
            return added
        return added + self._item_event(
            "response.content_part.added", content_index=0, part=_part_of(item, "")
        )

    def _delta(self, text: str) -> bytes:
        if self._input is not None and self._open_kind == CUSTOM:
            text = self._input.feed(text)
        return self._text_delta(text)

    def _text_delta(self, text: str) -> bytes:
        if not text:
            return b""
        self._text += text
        kind = self._item["type"]
        return self._item_event(f"response.{_TEXT_EVENTS[kind]}.delta", delta=text, **_place(kind))

    def _end_call(self) -> bytes:
        rest = self._input.close() if self._input is not None else ""
        return self._text_delta(rest) + self._end()

    def _end(self, *, complete: bool = True) -> bytes:
        if self._open_kind is None:
            return b""
        kind, self._open_kind = self._open_kind, None
        text = {_TEXT_FIELDS.get(kind, "text"): self._text, **_place(kind)}
        if kind == FUNCTION:
            text["name"] = self._item["name"]
        done = self._item_event(f"response.{_TEXT_EVENTS[kind]}.done", **text)
        if kind not in _TEXT_FIELDS:
            part = _part_of(self._item, self._text)
            done += self._item_event("response.content_part.done", part=part, content_index=0)
        status = "completed" if complete else "incomplete"
        item = _filled(self._item, self._text) | {"status": status}
        done += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        return done

    def _new_call(self, call_id: str, name: str) -> Item:
        kind = CUSTOM if name in self._job.tool_use.custom else FUNCTION
        call = {"type": kind, "status": "in_progress", _TEXT_FIELDS[kind]: ""}
        for namespace in self._job.tool_use.namespaces:
            if name.startswith(full_name(namespace, "")):
                name = name.removeprefix(full_name(namespace, ""))
                call["namespace"] = namespace
        return {"id": _id(kind), "call_id": call_id, "name": name, **call}

    def _item_event(self, kind: str, **data: Any) -> bytes:
        place = {"item_id": self._item["id"], "output_index": len(self._done)}
        return self._event(kind, **place, **data)

    def _event(self, kind: str, **data: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": number, **data})

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
            "model": self._job.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": items,
            "truncation": "disabled",
            "usage": None,
            **self._echo,
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


def _new_item(kind: str) -> Item:
    own: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
    return {"id": _id(kind), "type": kind, "status": "in_progress", "content": [], **own}


def _filled(item: Item, text: str) -> Item:
    if item["type"] in _TEXT_FIELDS:
        return item | {_TEXT_FIELDS[item["type"]]: text, "status": "completed"}
    return item | {"content": [_part_of(item, text)], "status": "completed"}


def _part_of(item: Item, text: str) -> Item:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _place(kind: str) -> Item:
    if kind in _TEXT_FIELDS:
        return {}
    return {"content_index": 0, "logprobs": []} if kind == "message" else {"content_index": 0}


def _id(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"
