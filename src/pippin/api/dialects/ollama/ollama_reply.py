"""Replies as Ollama writes them: lines of JSON, durations in nanoseconds. Knows no request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

import msgspec

from pippin.api.dialects.dialect import logprobs_entry
from pippin.api.dialects.event_template import HOLE, EventTemplate
from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run_job import FoldedChoice
from pippin.errors import PippinError
from pippin.sequences import SequencePiece, ShownToken
from pippin.text.cut_json import members_of
from pippin.text.pieces import CallArguments, CallBegin, CallEnd, Content, FoldedCall, Reasoning
from pippin.text.tokenizer import Tokenizer

NANOSECONDS = 1_000_000_000
HEARTBEAT = b" "  # may precede JSON, where an empty line is an error to Ollama's Python client


def ollama_error(error: PippinError) -> dict[str, Any]:
    return {"error": error.message}


def rfc3339(unix_s: float | None = None) -> str:
    now = datetime.now(UTC) if unix_s is None else datetime.fromtimestamp(unix_s, UTC)
    return now.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def line(data: dict[str, Any]) -> bytes:
    return msgspec.json.encode(data) + b"\n"


def nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it."""
    return max(1, round(seconds * NANOSECONDS))


class OllamaStream:
    """The part that chats and generated texts have in common."""

    def __init__(self, job: Job, tokenizer: Tokenizer, load_s: float = 0.0) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._load_s = load_s  # that it waited for its model
        self._open_calls: dict[int, FoldedCall] = {}
        self._finish: str | None = None
        self._tokens: list[int] = []  # of the reply
        self._text_line: EventTemplate | None = None  # with nothing but text

    def _said(self, text: str, thinking: str, calls: Iterable[FoldedCall]) -> dict[str, Any]:
        raise NotImplementedError

    def open(self) -> bytes:
        return b""

    def events(self, piece: SequencePiece) -> bytes:
        self._finish = piece.finish
        self._tokens += piece.tokens
        if len(piece.pieces) == 1 and isinstance(piece.pieces[0], Content) and not piece.shown:
            return self._line_of(piece.pieces[0].text)
        text, thinking, calls = "", "", []
        for part in piece.pieces:
            match part:
                case Content(more):
                    text += more
                case Reasoning(more):
                    thinking += more
                case CallBegin(index, id, name):
                    self._open_calls[index] = FoldedCall(id, name)
                case CallArguments(index, more):
                    self._open_calls[index].arguments += more
                case CallEnd(index, unparsed):
                    call = self._open_calls.pop(index)
                    if unparsed is None or piece.finish == "length":
                        calls.append(call)  # Ollama sends calls whole
                    else:
                        text += unparsed
        if not (text or thinking or calls or piece.shown):
            return b""
        return line(self._envelope(self._said(text, thinking, calls), piece.shown, done=False))

    def _line_of(self, text: str) -> bytes:
        if self._text_line is None:
            envelope = self._envelope(self._said(HOLE, "", []), [], done=False)
            self._text_line = EventTemplate(line(envelope | {"created_at": HOLE}))
        return self._text_line.fill(rfc3339(), text)

    def close(self) -> bytes:
        return line(self._envelope(self._said("", "", []), [], done=True) | self._end(self._finish))

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        (choice,) = choices
        self._tokens, self._finish = choice.tokens, choice.finish
        text = choice.text
        said = self._said(text.content, text.reasoning, text.calls.values())
        return self._envelope(said, choice.shown, done=True) | self._end(choice.finish)

    def error(self, error: PippinError) -> bytes:
        return line(ollama_error(error))

    def _envelope(
        self, said: dict[str, Any], shown: Sequence[ShownToken], *, done: bool
    ) -> dict[str, Any]:
        entries = [logprobs_entry(token, self._tokenizer) for token in shown]
        logprobs = {"logprobs": entries} if entries else {}
        head = {"model": self._job.model, "created_at": rfc3339()}
        return {**head, **said, **logprobs, "done": done}

    def _end(self, finish: str | None) -> dict[str, Any]:
        times, now = self._job.timing, perf_counter()
        submitted = now if times.submitted is None else times.submitted
        first = now if times.first is None else times.first
        last = now if times.last is None else times.last
        return {
            "done_reason": finish,
            "total_duration": nanoseconds(self._load_s + now - submitted),
            "load_duration": nanoseconds(self._load_s),
            "prompt_eval_count": self._job.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - submitted),
            "eval_count": self._job.completion_tokens,
            "eval_duration": nanoseconds(last - first),
            **self._job.omitted,
        }


class OllamaChat(OllamaStream):
    def _said(self, text: str, thinking: str, calls: Iterable[FoldedCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if written := [_call(call, cut=self._finish == "length") for call in calls]:
            message["tool_calls"] = written
        return {"message": message}


class OllamaGenerate(OllamaStream):
    def _said(self, text: str, thinking: str, calls: Iterable[FoldedCall]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def _end(self, finish: str | None) -> dict[str, Any]:
        """With the tokens that a later request may send back."""
        context = [*self._job.prompts[0].tokens, *self._tokens]
        return super()._end(finish) | {"context": context}


def _call(call: FoldedCall, *, cut: bool) -> dict[str, Any]:
    """Of a call that was cut, the arguments that can be read."""
    written = msgspec.Raw((call.arguments or "{}").encode())
    arguments = members_of(call.arguments) if cut else written
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments}}
