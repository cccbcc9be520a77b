"""A reply as Anthropic's message: blocks of thinking, text and tool use. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pippin.api.dialects.block_stream import BlockStream
from pippin.api.dialects.dialect import named_event
from pippin.api.dialects.event_template import HOLE, EventTemplate
from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run_job import FoldedChoice
from pippin.errors import PippinError
from pippin.text.cut_json import members_of

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_DELTAS = {  # by the type of a block: the type of a delta, and the member with its text
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def messages_error(error: PippinError) -> dict[str, Any]:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ERROR_TYPES.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesDialect(BlockStream):
    TEXT, REASONING = "text", "thinking"

    def __init__(self, job: Job) -> None:
        self._job = job
        self._num_blocks = 0
        self._delta_event: EventTemplate | None = None  # of the open block
        self._called = False
        self._opened = False

    def open(self) -> bytes:
        """Nothing, if a ping had to be sent first."""
        if self._opened:
            return b""
        self._opened = True
        message = self._message([], None) | {"usage": self._usage(output_tokens=0)}
        return named_event({"type": "message_start", "message": message})

    def ping(self) -> bytes:
        """While a prompt is computed. As from Anthropic, a message is started before."""
        return self.open() + named_event({"type": "ping"})

    def close(self) -> bytes:
        delta = {
            "stop_reason": self._stop_reason(self._finish, called=self._called),
            "stop_sequence": self._stop_sequence,
        }
        usage = self._usage(self._job.completion_tokens)
        ended = self._end()
        ended += named_event({"type": "message_delta", "delta": delta, "usage": usage})
        return ended + named_event({"type": "message_stop"})

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        (choice,) = choices
        text = choice.text
        blocks: list[dict[str, Any]] = []
        if text.reasoning:
            blocks.append(_thinking(text.reasoning))
        if text.content:
            blocks.append(_text(text.content))
        for call in text.calls.values():
            given = _input(call.arguments, cut=choice.finish == "length")
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        stop_reason = self._stop_reason(choice.finish, called=bool(text.calls))
        return self._message(blocks, stop_reason) | {
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(self._job.completion_tokens),
        }

    def error(self, error: PippinError) -> bytes:
        return named_event(messages_error(error))

    def _begin(self, kind: str) -> bytes:
        return self._start(_thinking("") if kind == self.REASONING else _text(""))

    def _begin_call(self, id: str, name: str) -> bytes:
        return self._start({"type": "tool_use", "id": id, "name": name, "input": {}})

    def _start(self, block: dict[str, Any]) -> bytes:
        self._open_kind = block["type"]
        self._delta_event = None
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return named_event(start)

    def _delta(self, text: str) -> bytes:
        if self._delta_event is None:
            kind, member = _DELTAS[self._open_kind or ""]
            delta = {"type": kind, member: HOLE}
            event = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
            self._delta_event = EventTemplate(named_event(event))
        return self._delta_event.fill(text)

    def _end_call(self) -> bytes:
        self._called = True
        return self._end()

    def _end(self, *, complete: bool = True) -> bytes:
        if self._open_kind is None:
            return b""
        self._open_kind = None
        self._num_blocks += 1
        return named_event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _message(self, blocks: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": blocks,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            **self._job.omitted,
        }

    @property
    def _stop_sequence(self) -> str | None:
        return self._job.sequences[0].stop_string

    def _stop_reason(self, finish: str | None, *, called: bool) -> str:
        if finish == "length":
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if called else "end_turn"

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        cached = self._job.cached_tokens
        return {
            "input_tokens": self._job.prompt_tokens - cached,  # Anthropic counts them apart
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }


def _input(arguments: str, *, cut: bool) -> Any:
    """As it was written; of a call that was cut, what can be read."""
    return members_of(arguments) if cut else msgspec.Raw((arguments or "{}").encode())


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}  # nothing here is signed


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
