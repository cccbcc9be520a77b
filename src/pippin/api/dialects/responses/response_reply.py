"""A reply as OpenAI's response: items of reasoning, text and calls. Knows no request's fields."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pippin.api.dialects.dialect import cached_details, named_event
from pippin.api.http.http_errors import error_body
from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run_job import FoldedChoice
from pippin.api.requests.custom_tools import InputReader, input_of
from pippin.api.requests.tools import full_name
from pippin.errors import PippinError
from pippin.sequences import SequencePiece
from pippin.text.pieces import CallArguments, CallBegin, CallEnd, Content, Reasoning, TextPiece

Item = dict[str, Any]
Keep = Callable[[dict[str, Any]], bool]  # stores a response; whether it did


@dataclass(frozen=True)
class CallKind:
    """How one kind of calls is told."""

    prefix: str  # of its items' ids
    field: str  # that holds its text
    event: str
    names_function: bool = False  # when it is done

    def told(self, item: Item) -> Item:
        return {"name": item["name"]} if self.names_function else {}


FUNCTION, CUSTOM = "function_call", "custom_tool_call"
CALLS = {
    FUNCTION: CallKind("fc", "arguments", "function_call_arguments", names_function=True),
    CUSTOM: CallKind("ctc", "input", "custom_tool_call_input"),
}


class ResponsesDialect:
    def __init__(self, job: Job, echo: dict[str, Any], keep: Keep) -> None:
        self._job = job
        self._echo = echo
        self._keep = keep
        self._num_events = 0
        self._done: list[Item] = []
        self._item: Item | None = None  # that grows now
        self._text = ""  # of it, so far
        self._input = InputReader()  # of the custom tool that is called now
        self._finish: str | None = None

    def open(self) -> bytes:
        created = self._response("in_progress", [])
        return b"".join(
            self._event(kind, response=created)
            for kind in ("response.created", "response.in_progress")
        )

    def events(self, piece: SequencePiece) -> bytes:
        self._finish = piece.finish
        return b"".join(self._part(part, piece.finish) for part in piece.pieces)

    def close(self) -> bytes:
        ended = self._end_item("incomplete" if self._finish == "length" else "completed")
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
        return self._finished(choice.finish, items)

    def error(self, error: PippinError) -> bytes:
        told = error_body(error)["error"]
        failed = self._response("failed", self._done) | {
            "error": {"code": "server_error", "message": error.message}
        }
        return self._event(
            "error", code=told["code"], message=error.message, param=told["param"]
        ) + self._event("response.failed", response=failed)

    def _part(self, part: TextPiece, finish: str | None) -> bytes:
        match part:
            case Content(text):
                return self._begin_item("message") + self._delta(text)
            case Reasoning(text):
                return self._begin_item("reasoning") + self._delta(text)
            case CallBegin(_, id, name):
                self._input = InputReader()
                return self._end_item() + self._start(self._new_call(id, name))
            case CallArguments(_, text):
                return self._delta(self._input.feed(text) if self._is_custom else text)
            case CallEnd(_, unparsed):
                if unparsed is None:
                    rest = self._input.close() if self._is_custom else ""
                    return self._delta(rest) + self._end_item()
                ended = self._end_item("incomplete")
                if finish == "length":
                    return ended
                return ended + self._begin_item("message") + self._delta(unparsed)

    def _begin_item(self, kind: str) -> bytes:
        if self._item is not None and self._item["type"] == kind:
            return b""
        return self._end_item() + self._start(_new_item(kind))

    def _start(self, item: Item) -> bytes:
        self._item, self._text = item, ""
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        if item["type"] in CALLS:
            return added
        return added + self._item_event(
            "response.content_part.added", content_index=0, part=_part_of(item, "")
        )

    def _delta(self, text: str) -> bytes:
        assert self._item is not None, "a delta belongs to an item"
        if not text:
            return b""
        self._text += text
        kind = self._item["type"]
        if kind in CALLS:
            return self._item_event(f"response.{CALLS[kind].event}.delta", delta=text)
        if kind == "reasoning":
            return self._item_event("response.reasoning_text.delta", content_index=0, delta=text)
        return self._item_event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=[]
        )

    def _end_item(self, status: str = "completed") -> bytes:
        if self._item is None:
            return b""
        kind = self._item["type"]
        if kind in CALLS:
            told = {CALLS[kind].field: self._text, **CALLS[kind].told(self._item)}
            done = self._item_event(f"response.{CALLS[kind].event}.done", **told)
        else:
            place = {"content_index": 0}
            logprobs: Item = {"logprobs": []} if kind == "message" else {}
            name = "output_text" if kind == "message" else "reasoning_text"
            done = self._item_event(f"response.{name}.done", text=self._text, **place, **logprobs)
            part = _part_of(self._item, self._text)
            done += self._item_event("response.content_part.done", part=part, **place)
        item = _filled(self._item, self._text) | {"status": status}
        done += self._event("response.output_item.done", output_index=self._index, item=item)
        self._done.append(item)
        self._item = None
        return done

    def _new_call(self, call_id: str, name: str) -> Item:
        kind = CUSTOM if name in self._job.tool_use.custom else FUNCTION
        call = {"type": kind, "status": "in_progress", CALLS[kind].field: ""}
        for namespace in self._job.tool_use.namespaces:
            if name.startswith(full_name(namespace, "")):
                name = name.removeprefix(full_name(namespace, ""))
                call["namespace"] = namespace
        return {"id": _id(CALLS[kind].prefix), "call_id": call_id, "name": name, **call}

    @property
    def _is_custom(self) -> bool:
        return self._item is not None and self._item["type"] == CUSTOM

    @property
    def _index(self) -> int:
        return len(self._done)

    def _item_event(self, kind: str, **data: Any) -> bytes:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **data)

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
    prefix = {"message": "msg", "reasoning": "rs"}[kind]
    item: Item = {"id": _id(prefix), "type": kind, "status": "in_progress", "content": []}
    own: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
    item |= own
    return item


def _filled(item: Item, text: str) -> Item:
    """The item with all of its text."""
    if item["type"] in CALLS:
        return item | {CALLS[item["type"]].field: text, "status": "completed"}
    return item | {"content": [_part_of(item, text)], "status": "completed"}


def _part_of(item: Item, text: str) -> dict[str, Any]:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
