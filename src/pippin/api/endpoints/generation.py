"""The endpoints that take text or tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pippin.api.dialects.dialect import Dialect, reply_events, whole_reply
from pippin.api.endpoints.app_state import AppState, Handler, Runnable
from pippin.api.http.access_control import owner_of
from pippin.api.http.answers import JSONResponse, record_of
from pippin.api.http.sending import StreamResponse, WholeResponse
from pippin.api.job import Job, prepare, render_prompt
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import MAX_MESSAGES, Body, Leniency, check_count
from pippin.api.requests.fields import (
    BOOLEAN,
    MODEL,
    TEMPLATE,
    FieldTable,
    conversation,
    refused_field,
    rows_of,
    texts_or_ids,
)
from pippin.api.requests.messages import parse_messages
from pippin.api.requests.neutral_request import ChatRequest, CompletionRequest
from pippin.api.requests.sampling_fields import continues_final_message, template_variables
from pippin.api.requests.shared_fields import ROLES
from pippin.api.response_store import ResponseStore
from pippin.api.served_models import ModelLease, ServedText
from pippin.errors import RequestError
from pippin.text.bundle import TextBundle
from pippin.text.prompt import chat_prompt, check_nbytes, nbytes_of

J = TypeVar("J", bound=Runnable)
TextAnswer = tuple[dict[str, Any], Leniency]


def generates(
    parse: Callable[[Any, RequestRules], ChatRequest | CompletionRequest], dialect: type[Dialect]
) -> Handler:
    """An endpoint whose reply is generated, and written by a dialect: whole or as a stream."""

    def read(fields: Any, served: ServedText) -> Job:
        return prepare(parse(fields, served.rules), served, dialect.prefix)

    async def handle(state: AppState, request: Request) -> Response:
        job, lease = await state.prepare(request, read)
        return answer(job, lease, dialect(job, lease))

    return handle


def counts(parse: Callable[[Any, RequestRules], ChatRequest], **more: str) -> Handler:
    """An endpoint that counts the tokens of a request's prompt."""

    def count(fields: Any, served: ServedText) -> TextAnswer:
        chat = parse(fields, served.rules)
        prompt = render_prompt(chat, served.text, served.model.max_counted_bytes)
        return {**more, "input_tokens": len(prompt.tokens)}, chat.leniency

    return read_by(count)


def read_by(work: Callable[[Any, ServedText], TextAnswer]) -> Handler:
    """An endpoint that needs a model's text, and not its engine."""

    async def handle(state: AppState, request: Request) -> Response:
        reply, leniency = await state.read(request, work)
        record_of(request.scope).ignored = leniency.header()
        return JSONResponse(reply)

    return handle


def answered_whole(
    parse: Callable[[Any, ServedText], J],
    reply: Callable[[J, ModelLease], Awaitable[dict[str, Any]]],
) -> Handler:
    """An endpoint that needs an engine, and has no streams."""

    async def handle(state: AppState, request: Request) -> Response:
        job, lease = await state.prepare(request, parse)
        return WholeResponse(lambda: reply(job, lease), job.timeout_s)

    return handle


def answer(job: Job, lease: ModelLease, dialect: Dialect) -> Response:
    if not job.stream:
        return WholeResponse(lambda: whole_reply(job, dialect, lease.engine), job.timeout_s)
    return StreamResponse(
        reply_events(job, dialect, lease.engine),
        encode_error=dialect.error,
        timeout_s=job.timeout_s,
        media_type=dialect.media_type,
        heartbeat=dialect.ping,
    )


TOKENIZE = FieldTable(
    {
        **MODEL,
        "prompt": texts_or_ids(ids=False),
        "messages": conversation(ROLES, {}, "role"),
        "add_special_tokens": BOOLEAN,
        **TEMPLATE,
        "return_token_strs": BOOLEAN,
        "chat_template": refused_field("the model's own template is used"),
        "tools": refused_field("tools are not rendered here", []),
    }
)
DETOKENIZE = FieldTable(
    {**MODEL, "tokens": texts_or_ids(texts=False), "skip_special_tokens": BOOLEAN},
    required=("tokens",),
)


def tokenize(fields: Any, served: ServedText) -> TextAnswer:
    """Of a list of prompts all values are lists, as SGLang's are."""
    text, rules = served.text, served.rules
    body = rules.body(fields)
    TOKENIZE.check(body, rules)
    wants_strings = body.get("return_token_strs", False)
    replies: list[dict[str, Any]] = [
        {
            "tokens": tokens,
            "count": len(tokens),
            "token_strs": [*map(text.tokenizer.token_text, tokens)] if wants_strings else None,
        }
        for tokens in _rows(body, text, rules.model.max_counted_bytes)
    ]
    if isinstance(body.get("prompt"), list):
        reply = {key: [row[key] for row in replies] for key in ("tokens", "count", "token_strs")}
    else:
        reply = replies[0]
    return {**reply, "max_model_len": rules.model.max_len}, body.leniency


def detokenize(fields: Any, served: ServedText) -> TextAnswer:
    """The text, under both servers' names for it."""
    tokenizer, rules = served.text.tokenizer, served.rules
    body = rules.body(fields)
    DETOKENIZE.check(body, rules)
    tokens = body.get("tokens")
    rows = rows_of(tokens)
    check_count(rows, MAX_MESSAGES, "tokens", "rows")
    num_tokens, most = sum(map(len, rows)), rules.model.max_counted_bytes
    if num_tokens > most:
        raise body.error("tokens", f"has {num_tokens:,} token ids; at most {most:,} are allowed")
    skips = body.get("skip_special_tokens", False)
    decode = tokenizer.decode if skips else tokenizer.decode_with_special
    texts = [decode(row) for row in rows]
    reply = texts if rows is tokens else texts[0]
    return {"text": reply, "prompt": reply}, body.leniency


def _rows(body: Body, text: TextBundle, max_bytes: int) -> list[list[int]]:
    if body.has("messages") == body.has("prompt"):
        raise RequestError("one of prompt and messages is required", param="prompt")
    if body.has("messages"):
        return [_chat_tokens(body, text, max_bytes)]
    for field in TEMPLATE:
        if body.has(field):
            raise body.error(field, "needs messages, and is not used with prompt")
    prompts = rows_of(body.get("prompt"))
    check_count(prompts, MAX_MESSAGES, "prompt", "texts")
    check_nbytes(sum(map(nbytes_of, prompts)), max_bytes, param="prompt")
    special = body.get("add_special_tokens", True)
    return [text.tokenizer.encode(item, add_special_tokens=special) for item in prompts]


def _chat_tokens(body: Body, text: TextBundle, max_bytes: int) -> list[int]:
    if body.get("add_special_tokens"):
        raise body.error("add_special_tokens", "needs prompt: a template adds its own")
    return chat_prompt(
        parse_messages(body),
        text,
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=continues_final_message(body),
        variables=template_variables(body),
        max_bytes=max_bytes,
    ).tokens


_LISTS = ("include", "include[]")  # as official clients spell a list


def read_query(request: Request, table: FieldTable, rules: RequestRules) -> Body:
    given = request.query_params
    fields: dict[str, Any] = {name: given[name] for name in given if name not in _LISTS}
    if included := [value for name in _LISTS for value in given.getlist(name)]:
        fields["include"] = included
    limit = fields.get("limit", "")
    if limit.removeprefix("-").isdecimal() and len(limit) < 10:
        fields["limit"] = int(limit)
    query = Body(fields)
    table.check(query, rules)
    return query


def page_of(items: list[dict[str, Any]], query: Body, *, limit: int, what: str) -> Response:
    """What follows `after`; `limit`: if the query has none."""
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise query.wrong("after", f"the id of {what}")
        items = items[ids.index(after) + 1 :]
    limit = query.get("limit", limit)
    page = items[:limit]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


async def show_response(state: AppState, request: Request) -> Response:
    return JSONResponse(_stored(state, request).get(request.path_params["id"]).response())


async def delete_response(state: AppState, request: Request) -> Response:
    id = request.path_params["id"]
    _stored(state, request).delete(id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def list_input_items(state: AppState, request: Request) -> Response:
    items = _stored(state, request).get(request.path_params["id"]).turn.input_items()
    if request.state.query.get("order", "desc") == "desc":
        items.reverse()
    return page_of(items, request.state.query, limit=20, what="an item of this response")


def _stored(state: AppState, request: Request) -> ResponseStore:
    return state.stored.of(owner_of(request.scope))
