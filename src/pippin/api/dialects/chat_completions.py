"""OpenAI's chat completions, with the reasoning as DeepSeek and others add it; and its text
completions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from pippin.api.dialects.dialect import (
    DONE,
    HOLE,
    LEAST_LOGPROB,
    Dialect,
    EventTemplate,
    cached_details,
    data_event,
    logprobs_entry,
    num_reasoning_tokens,
)
from pippin.api.job import FoldedChoice, Job
from pippin.api.model_info import RequestRules
from pippin.api.requests import fields as table
from pippin.api.requests import shared_fields as shared
from pippin.api.requests.fields import rows_of
from pippin.api.requests.messages import normalise, parse_messages, read_prediction
from pippin.api.requests.neutral_request import ChatRequest, CompletionRequest, Gap
from pippin.api.requests.sampling_fields import (
    check_choices,
    continues_final_message,
    effort_of,
    num_logprobs,
    read_options,
    template_variables,
)
from pippin.api.requests.tools import InputReader, input_of, read_tools
from pippin.api.served_models import ModelLease
from pippin.errors import PippinError
from pippin.sequences import SequencePiece, ShownToken
from pippin.text.pieces import CallArguments, CallBegin, CallEnd, Content, Reasoning, TextPiece
from pippin.types import TokenLogprobs

CHANGING_CHAT: table.Fields = {  # the same, of chats
    "chat_template": table.refused_field("the model's own template is used"),
    "documents": table.refused_field("send them in a message", []),
    "echo": table.refused_field("use continue_final_message", False),
    "input_ids": table.refused_field("use /v1/completions for tokens"),
    "chat_format": table.ignored_field("use --tool-parser"),
    "parse_tool_calls": table.refused_field("use tool_choice", True),
    "reasoning_in_content": table.refused_field("reasoning is always returned apart", False),
    "thinking_forced_open": table.ignored_field("the template decides", False),
    "grammar_lazy": table.refused_field("a grammar is for the whole reply", False),
    "grammar_triggers": table.refused_field("a grammar is for the whole reply", []),
    "preserved_tokens": table.ignored_field("tool calls are parsed"),
}
_PREDICTION = table.Members(
    "an object with a `type` of content and `content`, a string or a list of text parts: the reply "
    "that is expected",
    table=table.FieldTable(
        {
            "type": table.one_of("content"),
            "content": table.ValueKind("a string or a list of parts", str | list[Any]),
        },
        required=("type", "content"),
    ),
)
CHAT = table.FieldTable(
    {
        **table.GENERATION,
        "messages": table.conversation(shared.ROLES, {}, "role"),
        "max_completion_tokens": table.integer_from(1, ours="max_tokens"),
        "logprobs": table.BOOLEAN,
        "top_logprobs": table.integer_from(0, table.MAX_LOGPROBS),
        **shared.CALLING,
        "reasoning_effort": table.EFFORT,
        **table.LABELS,
        "metadata": table.OBJECT,  # not stored, so of any size and kind
        "prediction": _PREDICTION,
        **table.TEMPLATE,
        **shared.PROMPT,
        **shared.GENERATION,
        **shared.REASONING,
        **CHANGING_CHAT,
        "audio": table.refused_field(shared.TEXT_ONLY),
        "modalities": table.refused_field(shared.TEXT_ONLY, ["text"]),
        "function_call": table.refused_field("it is the old name of tool_choice", "none"),
        "functions": table.refused_field("it is the old name of tools", []),
        "store": table.ignored_field("replies are not stored; use /v1/responses", False),
        "verbosity": shared.VERBOSITY,
        "web_search_options": table.ignored_field("there is no web search"),
        **shared.IGNORED,
    },
    required=("messages",),
)
COMPLETION = table.FieldTable(
    {
        **table.GENERATION,
        "prompt": table.texts_or_ids(),
        "max_tokens": table.integer_from(0),
        "logprobs": table.integer_from(0, table.MAX_LOGPROBS),
        "echo": table.BOOLEAN,
        "best_of": table.integer_from(1, table.MAX_CHOICES),
        "suffix": table.STRING,
        **shared.PROMPT,
        **shared.GENERATION,
    },
    required=("prompt",),
)


class CompletionStream(Dialect):
    """The part that OpenAI's chat and text completions have in common."""

    object = ""  # what one object is called
    chunk_object = ""  # and one event

    def __init__(self, job: Job, lease: ModelLease) -> None:
        super().__init__(job, lease)
        self._templates: dict[Hashable, EventTemplate] = {}  # of chunks with nothing but text

    def close(self) -> bytes:
        if not self._job.include_usage:
            return DONE
        last = self._envelope(self.chunk_object, [])
        return data_event(last | {"usage": openai_usage(self._job)}) + DONE

    def error(self, error: PippinError) -> bytes:
        return super().error(error) + DONE

    def _event(self, choice: dict[str, Any]) -> bytes:
        usage = {"usage": None} if self._job.include_usage else {}
        return data_event(self._envelope(self.chunk_object, [choice]) | usage)

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope(self.object, choices) | {"usage": openai_usage(self._job)}

    def _envelope(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": object,
            "created": self._job.created_s,
            "model": self._job.model,
            "choices": choices,
            **self._job.omitted,
        }


def openai_usage(job: Job) -> dict[str, Any]:
    return {
        "prompt_tokens": job.num_prompt_tokens,
        "completion_tokens": job.num_tokens,
        "total_tokens": job.num_prompt_tokens + job.num_tokens,
        "prompt_tokens_details": cached_details(job),
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning_tokens(job),
            "accepted_prediction_tokens": job.num_drafts("accepted"),
            "rejected_prediction_tokens": job.num_drafts("rejected"),  # not among the completion's
        },
    }


def parse_chat(fields: Any, rules: RequestRules) -> ChatRequest:
    body = CHAT.read(fields, rules)
    effort, effort_field = effort_of(body)
    options = read_options(body, rules, num_logprobs(body))
    check_choices(1, options, rules.limits)
    return ChatRequest(
        options=options,
        messages=normalise(parse_messages(body), rules, options.salt),
        tool_use=read_tools(body, nested=True),
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


def parse_completion(fields: Any, rules: RequestRules) -> CompletionRequest:
    body = COMPLETION.read(fields, rules)
    prompts, echo = rows_of(body.get("prompt")), body.get("echo", False)
    if body.get("max_tokens") == 0 and not echo:
        raise body.wrong("max_tokens", "an integer of at least 1, or 0 with echo")
    num_logprobs = body.get("logprobs")
    prompt_logprobs = num_logprobs if echo else None
    options = read_options(body, rules, num_logprobs, prompt_logprobs=prompt_logprobs)
    check_choices(len(prompts), options, rules.limits)
    n = options.params.n
    if body.get("best_of", n) != n:
        raise body.unsupported("best_of", f"n is {n}, and only as many replies are computed")
    suffix = body.get("suffix", "")
    if suffix and echo:
        raise body.error("suffix", "and echo cannot be sent together")
    if (suffix or echo) and options.kept_tokens is not None:
        other = "suffix" if suffix else "echo"
        raise body.error(other, "and truncate_prompt_tokens cannot be sent together")
    gap = Gap(suffix) if suffix else None
    return CompletionRequest(options, prompts, echo, body.leniency, gap)


class CompletionsDialect(CompletionStream):
    object = chunk_object = "text_completion"

    def __init__(self, job: Job, lease: ModelLease) -> None:
        super().__init__(job, lease)
        self._with_logprobs = job.with_logprobs

    def events(self, piece: SequencePiece) -> bytes:
        text = piece.text
        if not (text or piece.shown or piece.finish):
            return b""
        if self._with_logprobs or piece.finish:
            return self._event(self._choice(piece.index, text, piece.shown, piece.finish))
        template = self._templates.get(piece.index)
        if template is None:
            event = self._event(self._choice(piece.index, HOLE, [], None))
            template = self._templates[piece.index] = EventTemplate(event)
        return template.fill(text)

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        return self._whole(
            [self._choice(c.index, c.text.content, c.shown, c.finish) for c in choices]
        )

    def _choice(
        self, index: int, text: str, tokens: list[ShownToken], finish: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens) if self._with_logprobs else None,
            "finish_reason": finish,
        }

    def _logprobs(self, tokens: list[ShownToken]) -> dict[str, Any]:
        return {
            "tokens": [self._tokenizer.token_text(token.id) for token in tokens],
            "token_logprobs": [
                None if t.logprobs is None else max(t.logprobs.logprob, LEAST_LOGPROB)
                for t in tokens
            ],
            "top_logprobs": [
                None if t.logprobs is None else self._top(t.id, t.logprobs) for t in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens by their text, and the chosen one even if it is none of them."""
        top = dict(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        by_text: dict[str, float] = {}
        for token, logprob in (top | {id: logprobs.logprob}).items():
            by_text.setdefault(self._tokenizer.token_text(token), max(logprob, LEAST_LOGPROB))
        return by_text
