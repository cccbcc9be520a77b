"""OpenAI's chat completions, with the reasoning as DeepSeek and others add it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pippin.api.dialects.dialect import HOLE, CompletionStream, EventTemplate, logprobs_entry
from pippin.api.jobs.run_job import FoldedChoice, Job
from pippin.api.model_info import RequestRules
from pippin.api.requests.messages import normalise, parse_messages, read_prediction
from pippin.api.requests.neutral_request import ChatRequest
from pippin.api.requests.openai_fields import CHAT
from pippin.api.requests.sampling_fields import (
    check_choices,
    continues_final_message,
    effort_of,
    num_logprobs,
    read_options,
    template_variables,
)
from pippin.api.requests.tools import InputReader, input_of, read_chat_tools
from pippin.api.served_models import ModelLease
from pippin.sequences import SequencePiece, ShownToken
from pippin.text.pieces import CallArguments, CallBegin, CallEnd, Content, Reasoning, TextPiece


def parse_chat(fields: Any, rules: RequestRules) -> ChatRequest:
    body = CHAT.read(fields, rules)
    effort, effort_field = effort_of(body)
    options = read_options(body, rules, num_logprobs(body))
    check_choices(1, options, rules.limits)
    return ChatRequest(
        options=options,
        messages=normalise(parse_messages(body), rules, options.salt),
        tool_use=read_chat_tools(body),
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=continues_final_message(body),
        reasoning_effort=effort,
        template_variables=template_variables(body),
        prediction=read_prediction(body, rules),
        effort_field=effort_field,
        leniency=body.leniency,
    )


class ChatDialect(CompletionStream):
    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, lease: ModelLease) -> None:
        super().__init__(job, lease)
        self._num_calls: dict[int, int] = {}  # complete ones, by choice
        self._inputs: dict[tuple[int, int], InputReader] = {}  # by choice and call

    def events(self, piece: SequencePiece) -> bytes:
        if len(piece.pieces) == 1 and not (piece.is_first or piece.shown or piece.finish):
            (part,) = piece.pieces
            if isinstance(part, Content | Reasoning):
                return self._text_chunk(part, piece)
        out = self._chunk(piece.index, {"role": "assistant", "content": ""}) * piece.is_first
        deltas = [delta for part in piece.pieces if (delta := self._delta(part, piece))]
        # One chunk at least carries the tokens' logprobs and how the reply finished.
        if not deltas and (piece.shown or piece.finish):
            deltas = [{}]
        for number, delta in enumerate(deltas):
            is_last = number == len(deltas) - 1
            logprobs = self._logprobs(piece.shown) if piece.shown and is_last else None
            finish = self._finish(piece.index, piece.finish) if is_last else None
            out += self._chunk(piece.index, delta, logprobs, finish)
        return out

    def _text_chunk(self, part: Content | Reasoning, piece: SequencePiece) -> bytes:
        key = piece.index, type(part)
        template = self._templates.get(key)
        if template is None:
            delta = self._delta(type(part)(HOLE), piece)
            assert delta is not None
            template = self._templates[key] = EventTemplate(self._chunk(piece.index, delta))
        return template.fill(part.text)

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        return self._whole([self._choice(choice) for choice in choices])

    def _delta(self, part: TextPiece, piece: SequencePiece) -> dict[str, Any] | None:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text}
            case CallBegin(index, id, name):
                if name in self._job.tool_use.custom:
                    self._inputs[piece.index, index] = InputReader()
                return {"tool_calls": [{"index": index, **self._call(id, name, "")}]}
            case CallArguments(index, text):
                if (reader := self._inputs.get((piece.index, index))) is not None:
                    return _input_delta(index, reader.feed(text))
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case CallEnd(index, unparsed=None):
                self._num_calls[piece.index] = self._num_calls.get(piece.index, 0) + 1
                if (reader := self._inputs.get((piece.index, index))) is not None:
                    return _input_delta(index, reader.close())
            case CallEnd(unparsed=text) if piece.finish != "length":
                return {"content": text}
        return None

    def _finish(self, index: int, finish: str | None) -> str | None:
        return "tool_calls" if finish == "stop" and self._num_calls.get(index) else finish

    def _choice(self, choice: FoldedChoice) -> dict[str, Any]:
        text = choice.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text.content or (None if text.calls else ""),
            "refusal": None,
        }
        if text.reasoning:
            message["reasoning_content"] = text.reasoning
        if text.calls:
            message["tool_calls"] = [
                self._call(call.id, call.name, call.arguments) for call in text.calls.values()
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.shown) if self._job.with_logprobs else None,
            "finish_reason": choice.finish_or("tool_calls"),
        }

    def _call(self, id: str, name: str, arguments: str) -> dict[str, Any]:
        if name in self._job.tool_use.custom:
            custom = {"name": name, "input": input_of(arguments)}
            return {"id": id, "type": "custom", "custom": custom}
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._event(choice)

    def _logprobs(self, tokens: list[ShownToken]) -> dict[str, Any]:
        return {"content": [logprobs_entry(t, self._tokenizer) for t in tokens], "refusal": None}


def _input_delta(index: int, text: str) -> dict[str, Any] | None:
    return {"tool_calls": [{"index": index, "custom": {"input": text}}]} if text else None
