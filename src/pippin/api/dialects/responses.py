"""OpenAI's Responses: items in, items and their events out."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pippin.api.dialects.dialect import (
    DONE,
    HOLE,
    BlockStream,
    EventTemplate,
    cached_details,
    named_event,
    num_reasoning_tokens,
)
from pippin.api.job import FoldedChoice, Job
from pippin.api.model_info import RequestRules
from pippin.api.requests import fields as table
from pippin.api.requests import shared_fields as shared
from pippin.api.requests.body import MAX_MESSAGES, Body, check_count
from pippin.api.requests.fields import FieldTable
from pippin.api.requests.messages import Message, function_call, read_arguments, texts_of
from pippin.api.requests.neutral_request import ChatRequest
from pippin.api.requests.sampling_fields import (
    effort_of,
    read_options,
    template_variables,
)
from pippin.api.requests.tools import (
    CALLS,
    OUTPUTS,
    SHELL_TOOLS,
    InputReader,
    arguments_of,
    arguments_of_call,
    call_fields,
    full_name,
    output_text,
    read_tools,
)
from pippin.api.response_store import Item, StoredTurn
from pippin.api.served_models import ModelLease
from pippin.errors import PippinError, RequestError, cut

_ANYTHING = table.ValueKind("any value")
_SUMMARY = table.one_of("auto", "concise", "detailed")
_INCLUDE: table.Fields = {
    "include": table.list_of(
        "reasoning.encrypted_content",
        # Of tools that are left out:
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    )
}
RESPONSES = table.FieldTable(
    {
        **table.MODEL,
        "input": table.ValueKind(
            f"a string, or a list of 1 to {MAX_MESSAGES:,} items",
            json_schema={
                "anyOf": [{"type": "string"}, table.some({"type": "object"}, MAX_MESSAGES)]
            },
        ),
        "instructions": table.STRING,
        "previous_response_id": table.LABEL,
        "store": table.BOOLEAN,
        "max_output_tokens": table.integer_from(1, ours="max_tokens"),
        **shared.CALLING,
        "reasoning": table.members(
            effort=table.EFFORT, summary=_SUMMARY, generate_summary=_SUMMARY, context=_ANYTHING
        ),
        "text": table.lifted(
            format=replace(table.OBJECT, ours="response_format"), verbosity=shared.VERBOSITY
        ),
        **_INCLUDE,
        **table.STREAM,
        **table.STREAM_OPTIONS,
        **table.SAMPLING,
        **table.STRUCTURE,
        **table.pick(table.TEMPLATE, "chat_template_kwargs"),
        "reasoning_effort": table.EFFORT,
        **table.USER,
        **table.LABELS,
        "client_metadata": table.Labels(),
        **table.SERVING,
        # Responses are one each, of max_output_tokens:
        **{
            name: kind
            for name, kind in shared.GENERATION.items()
            if name not in ("n_cmpl", "n_predict")
        },
        **{name: kind for name, kind in shared.REASONING.items() if name != "reasoning"},
        "access_programs": table.ignored_field(shared.NO_SERVICE),
        "background": table.refused_field("a reply is computed while its client waits", False),
        "context_management": table.ignored_field("contexts are not edited", []),
        "conversation": table.refused_field("use previous_response_id"),
        "image": table.refused_field(shared.TEXT_ONLY),
        "max_tool_calls": table.ignored_field(shared.NO_SERVICE),
        "prompt": table.refused_field("prompts are not stored"),
        "top_logprobs": table.refused_field("use chat completions for log probabilities", 0),
        "truncation": table.ignored_field("a conversation is never shortened", "disabled"),
        **shared.IGNORED,
    },
    required=("input",),
)
INPUT_TOKENS = table.FieldTable(
    {
        **RESPONSES.fields,
        "personality": table.refused_field("ask for it in the prompt"),
    },
    required=("input",),
)
MAX_LISTED = 100
STORED_RESPONSE = table.FieldTable(  # of a query
    {**_INCLUDE, "stream": table.refused_field("a stored response is sent as one object", "false")}
)
STORED_ITEMS = table.FieldTable(
    {
        **_INCLUDE,
        "limit": table.integer_from(1, MAX_LISTED),
        "order": table.one_of("asc", "desc"),
        "after": table.STRING,
    }
)


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


ENCRYPTED = "reasoning.encrypted_content"
_MARK = "pippin-reasoning-"  # what other servers encrypted begins otherwise, and cannot be read


@dataclass(frozen=True)
class ReasoningForm:
    """Where a client looks for reasoning."""

    summary: str | None = None  # it is all of it: no other model writes a shorter one
    encrypted: bool = False  # encoded, also: some clients send nothing else back

    @classmethod
    def asked(cls, body: Body) -> ReasoningForm:
        reasoning = body.object("reasoning") or Body({})
        return cls(
            summary=reasoning.get("summary") or reasoning.get("generate_summary"),
            encrypted=ENCRYPTED in body.get("include", ()),
        )

    @property
    def item(self) -> ItemForm:
        return REASONING if self.summary is None else SUMMARY

    def extra(self, text: str) -> dict[str, str]:
        """What a complete item has besides. Not secret: the client is shown the text too."""
        encoded = base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()
        return {"encrypted_content": _MARK + encoded} if self.encrypted else {}


def reasoning_of(item: Body) -> str:
    """The text of a past item: its content, or else what stands for it."""
    for key in ("content", "encrypted_content", "summary"):
        if key == "encrypted_content":
            text = _decoded(item.string(key, ""))
        else:
            parts = item.objects(key) if item.get(key) else []
            text = "".join(part.string("text", "") for part in parts)
        if text:
            return text
    return ""


def _decoded(given: str) -> str:
    if not given.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""


FindItems = Callable[[list[str]], Mapping[str, Item]]  # by their ids, among those that are stored
_ROLES = ("system", "developer", "user", "assistant")
_REFERENCE = "item_reference"
_TEXTS = ("content", "reasoning_content")  # of a message
_IGNORED = {"id", "status", "annotations", "logprobs", "phase"}  # as replies carry them
_IGNORED_OF_SHELLS = {*_IGNORED, "caller", "created_by", "environment"}
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    **{kind: SHELL_TOOLS[name].prefix for kind, name in CALLS.items()},
    **{kind: f"{SHELL_TOOLS[name].prefix}o" for kind, name in OUTPUTS.items()},
}


def read_items(body: Body, find_items: FindItems, max_bytes: int) -> list[Item]:
    """The input as items with ids. `max_bytes`: of references, each as often as it occurs."""
    given = body.require("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise body.wrong("input", "a string or a list of at least one item")
    check_count(given, MAX_MESSAGES, "input", "items")
    bodies = [Body(item, f"input[{number}]") for number, item in enumerate(given)]
    references = []
    for item in bodies:
        if item.get("type") == _REFERENCE:
            item.ignore_unknown({"type", "id"})
            references.append(item.required_string("id"))
    stored = find_items(references) if references else {}
    sizes = {id: len(msgspec.json.encode(item)) for id, item in stored.items()}
    nbytes = sum(sizes.get(id, 0) for id in references)
    if nbytes > max_bytes:
        raise RequestError(
            f"input refers to {nbytes:,} bytes of items; at most {max_bytes:,} are allowed "
            "(--max-body-bytes)",
            param="input",
        )
    return [_whole_item(item, stored) for item in bodies]


def messages_of(body: Body, before: Sequence[Item], items: Sequence[Item]) -> list[Message]:
    """A conversation. Items `before` it were checked when they were sent."""
    check_count([*before, *items], MAX_MESSAGES, "input", "items, with previous ones,")
    messages: list[Message] = []
    if body.has("instructions"):
        messages.append({"role": "system", "content": body.get("instructions")})
    for name, part in (("previous", before), ("input", items)):
        for number, item in enumerate(part):
            _add(Body(item, f"{name}[{number}]", body.leniency), messages)
    if not messages:
        raise body.error("input", "has no item that a model can be shown")
    return [_joined(message) for message in messages]


def _whole_item(item: Body, stored: Mapping[str, Item]) -> Item:
    """The item itself, if it is a reference; with an id, and its text as parts."""
    fields = {field: item.get(field) for field in item.fields()}
    kind, id = fields.get("type") or "message", item.string("id", None)
    if kind == _REFERENCE:
        if (found := stored.get(id or "")) is not None:
            return found
        raise RequestError(
            f"Item with id '{cut(id or '')}' not found. Items are not persisted when `store` is "
            "set to false, and dropped when too many are stored.",
            param=item.name("id"),
        )
    id = id or f"{_PREFIXES.get(str(kind), 'item')}_{uuid.uuid4().hex}"
    content = fields.get("content")
    if kind == "message" and isinstance(content, str):
        part_kind = "output_text" if fields.get("role") == "assistant" else "input_text"
        fields["content"] = [{"type": part_kind, "text": content}]
    return {**fields, "type": kind, "id": id}


def _add(item: Body, messages: list[Message]) -> None:
    match item.get("type"):
        case None | "message":
            _add_message(item, messages)
        case "reasoning":
            item.ignore_unknown({"type", "summary", "content", "encrypted_content", *_IGNORED})
            _turn(messages).setdefault("reasoning_content", []).append(reasoning_of(item))
        case "function_call" | "custom_tool_call":
            _turn(messages).setdefault("tool_calls", []).append(_call(item))
        case str(kind) if kind in CALLS:
            _turn(messages).setdefault("tool_calls", []).append(_shell_call(item, CALLS[kind]))
        case str(kind) if kind in OUTPUTS:
            messages.append(_shell_output(item))
        case "function_call_output" | "custom_tool_call_output":
            item.ignore_unknown({"type", "call_id", "output", *_IGNORED})
            call_id = item.required_string("call_id")
            content = _text(item, "output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case _:
            if item.is_foreign("type", (*_PREFIXES, _REFERENCE)):  # of a tool that OpenAI runs
                name = f"{item.path.partition('[')[0]}[].type"
                why = "this server runs no tools"
                item.leniency.ignore(name, why, item.required_string("type"))


def _add_message(item: Body, messages: list[Message]) -> None:
    item.ignore_unknown({"type", "role", "content", *_IGNORED})
    item.require("role")
    role = item.one_of("role", _ROLES)
    text = _text(item, "content")
    if role == "assistant":
        _turn(messages)["content"].append(text)
    else:
        messages.append({"role": role, "content": text})


def _turn(messages: list[Message]) -> Message:
    """The assistant's message that is being put together, its texts as lists of parts."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _joined(message: Message) -> Message:
    parts = {field: "".join(value) for field, value in message.items() if field in _TEXTS}
    return {**message, **parts}


def _text(item: Body, field: str) -> str:
    item.require(field)
    return "".join(texts_of(item, field))


def _call(item: Body) -> Message:
    text_field = "input" if item.get("type") == "custom_tool_call" else "arguments"
    item.ignore_unknown({"type", "call_id", "name", text_field, "namespace", *_IGNORED})
    id, name = item.required_string("call_id"), item.required_string("name")
    if text_field == "input":
        arguments = arguments_of(item.string(text_field, ""))
    else:
        arguments = read_arguments(item)
    if (namespace := item.string("namespace", None)) is not None:
        name = full_name(namespace, name)
    return function_call(id, name, arguments)


def _shell_call(item: Body, name: str) -> Message:
    item.ignore_unknown({"type", "call_id", SHELL_TOOLS[name].field, *_IGNORED_OF_SHELLS})
    return function_call(item.required_string("call_id"), name, arguments_of_call(item))


def _shell_output(item: Body) -> Message:
    """By OpenAI's types one of `local_shell` has the id of the call as its own."""
    item.ignore_unknown({"type", "call_id", "output", "max_output_length", *_IGNORED_OF_SHELLS})
    by_id = item.get("type") == "local_shell_call_output" and not item.has("call_id")
    call_id = item.required_string("id" if by_id else "call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": output_text(item)}


@dataclass(frozen=True)
class ResponsesRequest(ChatRequest):
    """And what the response repeats of it, and what is stored."""

    echo: dict[str, Any] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)  # of this turn
    previous: StoredTurn | None = None  # that it continues
    store: bool = False
    reasoning: ReasoningForm = ReasoningForm()


def parse_responses_request(
    fields: Any, rules: RequestRules, table: FieldTable = RESPONSES
) -> ResponsesRequest:
    body, stored = table.read(fields, rules), rules.stored
    effort, effort_field = effort_of(body)
    store = body.get("store", stored.enabled)
    if store and not stored.enabled:
        body.ignore("store", "this server stores no responses (--stored-responses)")
        store = False
    options = read_options(body, rules)
    previous_id = body.get("previous_response_id")
    previous = None if previous_id is None else stored.previous(previous_id)
    items = read_items(body, stored.items, rules.limits.max_body_bytes)
    before = [] if previous is None else previous.items()
    tool_use = read_tools(body, nested=False)
    reasoning = ReasoningForm.asked(body)
    echo = {
        "frequency_penalty": options.params.frequency_penalty,
        "instructions": body.get("instructions"),
        "max_output_tokens": options.max_tokens,
        "max_tool_calls": None,  # a reply ends with its calls: clients run them
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": tool_use.parallel,
        "presence_penalty": options.params.presence_penalty,
        "previous_response_id": previous_id,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": effort, "summary": reasoning.summary},
        "safety_identifier": body.get("safety_identifier"),
        "store": store,
        "temperature": options.params.temperature,
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": options.params.top_p,
        "user": body.get("user"),
    }
    return ResponsesRequest(
        options=options,
        messages=messages_of(body, before, items),
        tool_use=tool_use,
        reasoning_effort=effort,
        template_variables=template_variables(body),
        messages_field="input",
        effort_field=effort_field,
        leniency=body.leniency,
        echo=echo,
        items=items,
        previous=previous,
        store=store,
        reasoning=reasoning,
    )


class ResponsesDialect(BlockStream):
    prefix = "resp_"
    TEXT, REASONING, CALL, SHELL_CALL = "text", "reasoning", "call", "shell call"

    def __init__(self, job: Job, lease: ModelLease) -> None:
        super().__init__(job, lease)
        asked = job.request
        assert isinstance(asked, ResponsesRequest)
        self._asked = asked
        self._stored = lease.served.rules.stored
        self._reasoning = asked.reasoning
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
        """As the end of a stream has it."""
        (choice,) = choices
        for part in choice.pieces:
            self._part(part)
        self._end(complete=choice.finish != "length")
        return self._finished(choice.finish, self._done)

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
        done = self._event(f"response.{form.text_event}.done", **self._place, **value)
        done += self._part_event("done")
        item = form.filled(self._item, text)
        if kind == self.REASONING:
            item |= self._reasoning.extra(text)
        return done + self._add(item | {"status": "completed" if complete else "incomplete"})

    def _end_shell_call(self, *, complete: bool) -> bytes:
        text, (id, name) = self._text, self._call
        fields = call_fields(name, text) if complete else None
        if fields is None:  # these are not its arguments, and it is a function's call
            started = self._start(self.CALL, *self._new_call(id, name))
            return started + self._text_delta(text) + self._end(complete=complete)
        known = {"id": new_id(SHELL_TOOLS[name].prefix), "call_id": id, "status": "completed"}
        item = {**known, **fields}
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
        kind = f"response.{form.part_event}.{what}"
        return self._event(kind, **self._place, part=part, **form.place)

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
        if whole["store"]:
            turn = StoredTurn.of(self._asked.items, items, self._asked.previous)
            whole["store"] = self._stored.put(whole, turn)
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
            **self._asked.echo,
            **self._job.omitted,
        }

    def _usage(self) -> dict[str, Any]:
        job = self._job
        return {
            "input_tokens": job.num_prompt_tokens,
            "input_tokens_details": cached_details(job),
            "output_tokens": job.num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens(job)},
            "total_tokens": job.num_prompt_tokens + job.num_tokens,
        }
