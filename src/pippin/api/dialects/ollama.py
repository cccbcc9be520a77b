"""Ollama's API: its fields, of which it ignores those that it does not know, and its replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, Literal

import msgspec

from pippin.amounts import IN_WORDS, parse_duration
from pippin.api.dialects.dialect import HOLE, Dialect, EventTemplate, logprobs_entry
from pippin.api.http.sending import JSON_LINES
from pippin.api.job import FoldedChoice, Job
from pippin.api.model_info import RequestRules
from pippin.api.requests import fields as kinds
from pippin.api.requests.body import MAX_MESSAGES, Body, Leniency
from pippin.api.requests.fields import (
    MAX_LOGPROBS,
    SAMPLING,
    SERVING,
    STREAM,
    TOOLS,
    Fields,
    FieldTable,
    Members,
    Schema,
    ValueKind,
    ignored_field,
    refused_field,
)
from pippin.api.requests.messages import Message, function_call, message_bodies, text_in_place_of
from pippin.api.requests.neutral_request import ChatRequest, CompletionRequest, Gap, Options
from pippin.api.requests.sampling_fields import num_logprobs, read_options
from pippin.api.requests.shared_fields import ROLES
from pippin.api.requests.tools import read_tools
from pippin.api.served_models import LATEST, ModelLease
from pippin.errors import ModelNotFound, PippinError, cut
from pippin.sequences import SequencePiece, ShownToken
from pippin.text.pieces import CallEnd, FoldedCall, members_of
from pippin.text.tokenizer import Tokenizer

MAX_HUB_ID_CHARS = 256
THINK_LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
_TEXT_ONLY = "only text is generated"


class OllamaModelName(kinds.ModelName):
    """A name in `/api/tags`; its tag may be left out."""

    def schema(self, rules: RequestRules) -> Schema:
        if rules.model.accepted_names is None:
            return {"type": "string"}
        names = (*rules.model.accepted_names, *rules.model.other_names)
        return {"type": "string", "enum": [*names, *(f"{name}{LATEST}" for name in names)]}

    def check(self, body: Body, field: str, rules: RequestRules) -> Any:
        given = body.required_string(field)
        try:
            rules.model.check_name(given.removesuffix(LATEST))
        except ModelNotFound as error:
            serves = ", ".join((*rules.model.names, *rules.model.other_names))
            raise ModelNotFound(
                f"model '{cut(given)}' not found; this server serves {serves}", param=field
            ) from error


MODEL: Fields = {"model": OllamaModelName("a name in `/api/tags`, with or without `:latest`")}


class KeepAlive(ValueKind):
    """How long a model stays loaded after its last request, where models are unloaded at all."""

    def schema(self, rules: RequestRules) -> Schema:
        if not rules.model.on_demand:
            return {"description": "ignored: the model stays loaded"}
        return {"type": ["string", "number"], "description": IN_WORDS}

    def check(self, body: Body, field: str, rules: RequestRules) -> Any:
        seconds = parse_duration(body.get(field))
        if not rules.model.on_demand:
            body.ignore(field, "the model stays loaded")
        elif seconds is None:
            raise body.wrong(field, IN_WORDS)
        return seconds


_KEEP_ALIVE: Fields = {"keep_alive": KeepAlive(IN_WORDS)}
_LOADING = (  # how Ollama loads a model: it is loaded here already
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv"),
    *("logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only"),
)
_OTHER_SAMPLERS = (  # that are not computed here
    *("num_keep", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("tfs_z", "typical_p", "penalize_newline"),
)
_OPTIONS: Fields = {
    "num_predict": kinds.integer_from(-2),
    **SAMPLING,
    "seed": replace(SAMPLING["seed"], unset=-1),  # Ollama's word for "any"
    "repeat_penalty": replace(SAMPLING["repetition_penalty"], ours="repetition_penalty"),
    **dict.fromkeys(_LOADING, ignored_field("the model is loaded already")),
    **dict.fromkeys(_OTHER_SAMPLERS, ignored_field("it is not computed here")),
}
# Ollama has more of them with every version, and ignores those that it does not know.
OPTIONS = Members(
    "an object of options", table=FieldTable(_OPTIONS, ignores_unknown=True), lifted=True
)
_EVERY: Fields = {**MODEL, "options": OPTIONS, **_KEEP_ALIVE, **SERVING}
_REPLY: Fields = {
    **_EVERY,
    **STREAM,
    "format": ValueKind(
        '"json", or a JSON Schema',
        Literal["", "json"] | dict[str, Any],
        ours="json_schema",
        unset="",
        convert=lambda format: {"type": "object"} if format == "json" else format,
    ),
    "think": ValueKind(
        f"true, false, or one of {', '.join(THINK_LEVELS)}",
        bool | Literal[tuple(THINK_LEVELS)],
    ),
    "logprobs": kinds.BOOLEAN,
    "top_logprobs": kinds.integer_from(0, MAX_LOGPROBS),
    **dict.fromkeys(("truncate", "shift"), ignored_field("a conversation is never shortened")),
}
CHAT = FieldTable(
    {
        **_REPLY,
        "messages": ValueKind(
            f"a list of at most {MAX_MESSAGES:,} messages",
            list[Any],
            {"type": "array", "maxItems": MAX_MESSAGES},
        ),
        **TOOLS,
    },
    ignores_unknown=True,
)
GENERATE = FieldTable(
    {
        **_REPLY,
        "prompt": kinds.STRING,
        "suffix": kinds.STRING,
        "system": kinds.STRING,
        "raw": kinds.BOOLEAN,
        "context": kinds.ByRules(kind=kinds.token_ids),
        "images": ValueKind("a list of base64", list[str]),
        "template": refused_field("the model's own template is used", ""),
        **dict.fromkeys(("width", "height", "steps"), refused_field(_TEXT_ONLY, 0)),
    },
    ignores_unknown=True,
)
EMBED = FieldTable(
    {
        **_EVERY,
        "input": kinds.texts_or_ids(ids=False),
        "truncate": kinds.BOOLEAN,
        "dimensions": kinds.integer_from(1),
    },
    required=("input",),
    ignores_unknown=True,
)
EMBEDDINGS = FieldTable(
    {**_EVERY, "prompt": replace(kinds.STRING, ours="input")},
    required=("prompt",),
    ignores_unknown=True,
)
_SHOWN_OTHERWISE = ("verbose", "system", "template", "options")
SHOW = FieldTable(
    {
        **MODEL,
        "name": MODEL["model"],
        **dict.fromkeys(_SHOWN_OTHERWISE, ignored_field("the model is shown as it is")),
    },
    ignores_unknown=True,
)
_HUB_ID = kinds.text(MAX_HUB_ID_CHARS)
_HUB_MODEL: Fields = {"model": _HUB_ID, "name": _HUB_ID}
_NO_ACCOUNT = ignored_field("the server's own HF_TOKEN is used", "")
PULL = FieldTable(
    {
        **_HUB_MODEL,
        **STREAM,
        "insecure": ignored_field("the hub's certificate is always checked", False),
        **dict.fromkeys(("username", "password"), _NO_ACCOUNT),
    }
)
DELETE = FieldTable(_HUB_MODEL)


_MESSAGE_FIELDS = frozenset(
    {"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"}
)


@dataclass(frozen=True)
class LoadRequest:
    """For no reply, but for a model in memory, or out of it."""

    leniency: Leniency
    keep_alive_s: float | None  # 0: out of it
    timeout_s: float | None = None

    @property
    def done_reason(self) -> str:
        return "unload" if self.keep_alive_s == 0 else "load"

    def keep_apart(self, owner_salt: bytes) -> None:
        """It has no prefixes."""

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        return {}


def parse_ollama_chat(fields: Any, rules: RequestRules) -> ChatRequest | LoadRequest:
    body = CHAT.read(fields, rules)
    options, tool_use = _options(body, rules), read_tools(body, nested=True)
    if not body.get("messages"):
        return LoadRequest(body.leniency, options.keep_alive_s)
    messages = [_message(message) for message in message_bodies(body)]
    final = messages[-1]
    is_prefill = final["role"] == "assistant" and not final.get("tool_calls")
    return ChatRequest(
        options=options,
        messages=messages,
        continue_final_message=is_prefill,
        tool_use=tool_use,
        reasoning_effort=_effort(body),
        effort_field="think",
        leniency=body.leniency,
    )


def parse_generate(
    fields: Any, rules: RequestRules
) -> ChatRequest | CompletionRequest | LoadRequest:
    body = GENERATE.read(fields, rules)
    options = _options(body, rules)
    suffix = body.get("suffix")
    if not body.get("prompt") and not suffix:
        return LoadRequest(body.leniency, options.keep_alive_s)
    prompt = _with_images(body, "prompt")
    if suffix or body.get("raw"):
        for field in ("system", "context"):
            if body.get(field):
                beside = "suffix" if suffix else "raw"
                raise body.error(field, f"is not used with {beside}: write it into the prompt")
        gap = Gap(suffix) if suffix else None
        return CompletionRequest(options, [prompt], False, body.leniency, gap)
    messages = [{"role": "user", "content": prompt}]
    if system := body.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    return ChatRequest(
        options=options,
        messages=messages,
        reasoning_effort=_effort(body),
        previous_tokens=tuple(body.get("context", ())),
        messages_field="prompt",
        effort_field="think",
        leniency=body.leniency,
    )


def _options(body: Body, rules: RequestRules) -> Options:
    options = read_options(body, rules, num_logprobs(body))
    # 0 and less mean "as many as fit", and more than fits is cut down to it, as in Ollama.
    given = (body.get("num_predict"), options.most_tokens)
    most = min((n for n in given if n is not None and n > 0), default=None)
    stream = body.get("stream", True)
    changed = replace(options, stream=stream, most_tokens=most, max_tokens_field="num_predict")
    return replace(changed, keep_alive_s=body.get("keep_alive"))


def _effort(body: Body) -> str | None:
    think = body.get("think")
    if isinstance(think, bool):
        return "medium" if think else "none"
    return None if think is None else THINK_LEVELS[think]


def _message(body: Body) -> Message:
    body.require("role")
    body.ignore_unknown(_MESSAGE_FIELDS)
    message: Message = {
        "role": body.one_of("role", ROLES),
        "content": _with_images(body, "content"),
    }
    for field, name in (
        ("thinking", "reasoning_content"),
        ("tool_name", "name"),
        ("tool_call_id", "tool_call_id"),
    ):
        if text := body.string(field, ""):
            message[name] = text
    if body.get("tool_calls"):
        if message["role"] != "assistant":
            raise body.error("tool_calls", "must be in a message of the assistant")
        message["tool_calls"] = [_call_in_history(call) for call in body.objects("tool_calls")]
    return message


def _with_images(body: Body, field: str) -> str:
    """A text behind what takes the place of its images, which are base64."""
    if not isinstance(images := body.get("images", []), list):
        raise body.wrong("images", "a list of strings")
    path, leniency = body.name("images"), body.leniency
    parts = [Body({"type": "image", "data": data}, path, leniency) for data in images]
    return "\n".join([*map(text_in_place_of, parts), body.string(field, "")])


def _call_in_history(call: Body) -> Message:
    function = call.required_object("function")
    if function.has("arguments"):
        function.required_object("arguments")
    name, arguments = function.required_string("name"), function.get("arguments", {})
    return function_call(call.string("id", ""), name, arguments)


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


class OllamaStream(Dialect):
    """The part that chats and generated texts have in common."""

    media_type = JSON_LINES

    def __init__(self, job: Job, lease: ModelLease) -> None:
        super().__init__(job, lease)
        self._load_s = lease.waited_s
        self._reply = FoldedChoice(0)  # what has not been sent of it, and all of its tokens
        self._text_line: EventTemplate | None = None  # with nothing but text

    def _said(self, text: str, thinking: str, calls: Iterable[FoldedCall]) -> dict[str, Any]:
        raise NotImplementedError

    def ping(self) -> bytes:
        return HEARTBEAT

    def events(self, piece: SequencePiece) -> bytes:
        self._reply.add(piece)
        text = self._reply.text
        ended = [part.index for part in piece.pieces if isinstance(part, CallEnd)]
        calls = [text.calls.pop(index) for index in ended if index in text.calls]  # sent whole
        content, thinking, text.content, text.reasoning = text.content, text.reasoning, "", ""
        if thinking or calls or piece.shown:
            said = self._said(content, thinking, calls)
            return line(self._envelope(said, piece.shown, done=False))
        if not content:
            return b""
        if self._text_line is None:
            envelope = self._envelope(self._said(HOLE, "", []), [], done=False)
            self._text_line = EventTemplate(line(envelope | {"created_at": HOLE}))
        return self._text_line.fill(rfc3339(), content)

    def close(self) -> bytes:
        return line(self._envelope(self._said("", "", []), [], done=True) | self._end())

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        (self._reply,) = choices
        text = self._reply.text
        said = self._said(text.content, text.reasoning, text.calls.values())
        return self._envelope(said, self._reply.shown, done=True) | self._end()

    def error(self, error: PippinError) -> bytes:
        return line(ollama_error(error))

    def _envelope(
        self, said: dict[str, Any], shown: Sequence[ShownToken], *, done: bool
    ) -> dict[str, Any]:
        entries = [logprobs_entry(token, self._tokenizer) for token in shown]
        logprobs = {"logprobs": entries} if entries else {}
        head = {"model": self._job.model, "created_at": rfc3339()}
        return {**head, **said, **logprobs, "done": done}

    def _end(self) -> dict[str, Any]:
        times, now = self._job.timing, perf_counter()
        submitted = now if times.submitted is None else times.submitted
        first = now if times.first is None else times.first
        last = now if times.last is None else times.last
        return {
            "done_reason": self._reply.finish,
            "total_duration": nanoseconds(self._load_s + now - submitted),
            "load_duration": nanoseconds(self._load_s),
            "prompt_eval_count": self._job.num_prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - submitted),
            "eval_count": self._job.num_tokens,
            "eval_duration": nanoseconds(last - first),
            **self._job.omitted,
        }


class OllamaChat(OllamaStream):
    def _said(self, text: str, thinking: str, calls: Iterable[FoldedCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if written := [_call(call, cut=self._reply.finish == "length") for call in calls]:
            message["tool_calls"] = written
        return {"message": message}


class OllamaGenerate(OllamaStream):
    def _said(self, text: str, thinking: str, calls: Iterable[FoldedCall]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}

    def _end(self) -> dict[str, Any]:
        """With the tokens that a later request may send back."""
        context = [*self._job.prompts[0].tokens, *self._reply.tokens]
        return super()._end() | {"context": context}


def _call(call: FoldedCall, *, cut: bool) -> dict[str, Any]:
    """Of a call that was cut, the arguments that can be read."""
    written = msgspec.Raw((call.arguments or "{}").encode())
    arguments = members_of(call.arguments) if cut else written
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments}}
