"""OpenAI's chat completions, with the reasoning as DeepSeek and others add it. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pippin.api.dialects.completions import DONE, LEAST_LOGPROB
from pippin.api.dialects.dialect import data_event, openai_usage
from pippin.api.dialects.openai_tools import read_chat_tools
from pippin.api.dialects.shared_options import (
    check_choices,
    check_metadata,
    check_model,
    read_options,
)
from pippin.api.http.http_errors import error_body
from pippin.api.jobs.prepare import Job
from pippin.api.jobs.run_job import FoldedChoice
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import Body
from pippin.api.requests.chat_messages import parse_messages
from pippin.api.requests.custom_tools import InputReader, input_of
from pippin.api.requests.fields import CHAT_HONOURED, CHAT_REFUSED, check_fields
from pippin.api.requests.neutral_request import ChatRequest
from pippin.api.requests.reasoning_effort import EFFORTS
from pippin.api.requests.sampling_fields import MAX_LOGPROBS
from pippin.config import LimitsConfig
from pippin.errors import PippinError, RequestError
from pippin.sequences import SequencePiece, ShownToken
from pippin.text.bundle import SamplingDefaults
from pippin.text.chat_template import RESERVED_VARIABLES
from pippin.text.pieces import CallArguments, CallBegin, CallEnd, Content, Reasoning, TextPiece
from pippin.text.tokenizer import Tokenizer


def parse_chat(
    fields: Any, model: ModelInfo, defaults: SamplingDefaults, limits: LimitsConfig
) -> ChatRequest:
    body = Body(fields)
    check_fields(body, CHAT_HONOURED, CHAT_REFUSED)
    check_model(body, model)
    check_metadata(body)
    for label in ("user", "safety_identifier", "prompt_cache_key"):
        body.label(label)
    options = read_options(body, model, defaults, limits, _num_logprobs(body))
    check_choices(1, options, limits)
    return ChatRequest(
        options=options,
        messages=parse_messages(body.require("messages")),
        tool_use=read_chat_tools(body),
        add_generation_prompt=body.boolean("add_generation_prompt", True),
        reasoning_effort=body.one_of("reasoning_effort", EFFORTS),
        template_variables=_template_variables(body),
    )


def _num_logprobs(body: Body) -> int | None:
    wanted = body.boolean("logprobs", False)
    num_top = body.integer("top_logprobs", 0, MAX_LOGPROBS, None)
    if num_top is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (num_top or 0) if wanted else None


def _template_variables(body: Body) -> dict[str, Any]:
    if not body.has("chat_template_kwargs"):
        return {}
    variables = Body(body.get("chat_template_kwargs"), "chat_template_kwargs")
    for key in variables.fields():
        if key in RESERVED_VARIABLES:
            name = variables.name(key)
            raise RequestError(f"{name} cannot be set: the server sets it", param=name)
    return {key: variables.get(key) for key in variables.fields()}


class ChatDialect:
    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._num_calls: dict[int, int] = {}  # complete ones, by choice
        self._inputs: dict[tuple[int, int], InputReader] = {}  # by choice and call

    def open(self) -> bytes:
        return b""

    def events(self, piece: SequencePiece) -> bytes:
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

    def close(self) -> bytes:
        if not self._job.include_usage:
            return DONE
        last = self._envelope("chat.completion.chunk", [])
        return data_event(last | {"usage": openai_usage(self._job)}) + DONE

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        told = [self._choice(choice) for choice in choices]
        return self._envelope("chat.completion", told) | {"usage": openai_usage(self._job)}

    def error(self, error: PippinError) -> bytes:
        return data_event(error_body(error)) + DONE

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
        usage = {"usage": None} if self._job.include_usage else {}
        return data_event(self._envelope("chat.completion.chunk", [choice]) | usage)

    def _envelope(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": object,
            "created": self._job.created_s,
            "model": self._job.model,
            "choices": choices,
        }

    def _logprobs(self, tokens: list[ShownToken]) -> dict[str, Any]:
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: ShownToken) -> dict[str, Any]:
        assert token.logprobs is not None, "every token of a reply was predicted"
        top = zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
        return {
            **self._token(token.id, token.logprobs.logprob),
            "top_logprobs": [self._token(id, logprob) for id, logprob in top],
        }

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(id),
            "bytes": list(self._tokenizer.token_bytes(id)),
            "logprob": max(logprob, LEAST_LOGPROB),
        }


def _input_delta(index: int, text: str) -> dict[str, Any] | None:
    return {"tool_calls": [{"index": index, "custom": {"input": text}}]} if text else None
