"""The fields of Ollama's API, whose server ignores all others. Knows no value's use."""

from __future__ import annotations

from typing import Any

from pippin.api.fields import value_kinds as kinds
from pippin.api.fields.openai import ROLES
from pippin.api.fields.shared import MAX_LOGPROBS, SAMPLING, SERVING, STREAM, TOOLS, Fields, pick
from pippin.api.fields.table import FieldTable, Members, ignored_field, refused_field
from pippin.api.fields.value_kinds import Schema, ValueKind
from pippin.api.http.http_errors import ModelNotFound
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.bounds import MAX_MESSAGES
from pippin.api.requests.token_ids import are_token_ids, token_ids_in_words
from pippin.durations import IN_WORDS, parse_duration
from pippin.errors import cut

MAX_HUB_ID_CHARS = 256
LATEST = ":latest"  # the tag of a name that has none
THINK_LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "xhigh"}
_TEXT_ONLY = "only text is generated"


class OllamaModelName(kinds.ModelName):
    """A name in `/api/tags`; its tag may be left out."""

    def schema(self, rules: RequestRules) -> Schema:
        if rules.model.accepted_names is None:
            return {"type": "string"}
        names = (*rules.model.accepted_names, *rules.model.other_names)
        return {"type": "string", "enum": [*names, *(f"{name}{LATEST}" for name in names)]}

    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        given = body.required_string(field)
        try:
            rules.model.check_name(given.removesuffix(LATEST))
        except ModelNotFound as error:
            serves = ", ".join((*rules.model.names, *rules.model.other_names))
            raise ModelNotFound(
                f"model '{cut(given)}' not found; this server serves {serves}", param=field
            ) from error


class TokenIds(ValueKind):
    """One list of them."""

    def words(self, rules: RequestRules) -> str:
        return f"a list of {token_ids_in_words(rules.vocab_size)}"

    def schema(self, rules: RequestRules) -> Schema:
        ids = kinds.integer_from(0, rules.vocab_size - 1).json_schema
        return {"type": "array", "items": ids}

    def accepts(self, value: Any, rules: RequestRules) -> bool:
        return are_token_ids(value, rules.vocab_size)


MODEL: Fields = {"model": OllamaModelName("a name in `/api/tags`, with or without `:latest`")}


class KeepAlive(ValueKind):
    """How long a model stays loaded after its last request, where models are unloaded at all."""

    def schema(self, rules: RequestRules) -> Schema:
        if not rules.model.on_demand:
            return {"description": "ignored: the model stays loaded"}
        return {"type": ["string", "number"], "description": IN_WORDS}

    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        if not rules.model.on_demand:
            body.ignore(field, "the model stays loaded")
        elif parse_duration(body.get(field)) is None:
            raise body.wrong(field, IN_WORDS)


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
    **pick(
        SAMPLING,
        *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
        *("presence_penalty", "frequency_penalty", "speculate", "ignore_eos"),
    ),
    "repeat_penalty": SAMPLING["repetition_penalty"],
    **dict.fromkeys(_LOADING, ignored_field("the model is loaded already")),
    **dict.fromkeys(_OTHER_SAMPLERS, ignored_field("it is not computed here")),
}
# Ollama has more of them with every version, and ignores those that it does not know.
OPTIONS = Members("an object of options", table=FieldTable(_OPTIONS, ignores_unknown=True))
_EVERY: Fields = {**MODEL, "options": OPTIONS, **_KEEP_ALIVE, **SERVING}
_REPLY: Fields = {
    **_EVERY,
    **STREAM,
    "format": ValueKind(
        '"json", or a JSON Schema',
        {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]},
        lambda value: value in ("", "json") or isinstance(value, dict),
    ),
    "think": ValueKind(
        f"true, false, or one of {', '.join(THINK_LEVELS)}",
        {"enum": [True, False, *THINK_LEVELS]},
        lambda value: isinstance(value, bool) or value in tuple(THINK_LEVELS),
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
            {
                "type": "array",
                "maxItems": MAX_MESSAGES,
                "items": {
                    "type": "object",
                    "properties": {"role": {"enum": list(ROLES)}},
                    "required": ["role"],
                },
            },
            lambda value: isinstance(value, list),
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
        "context": TokenIds(),
        "images": ValueKind(
            "a list of base64",
            {"type": "array", "items": kinds.STRING.json_schema},
            lambda value: isinstance(value, list) and all(isinstance(e, str) for e in value),
        ),
        "template": refused_field("the model's own template is used", ""),
        **dict.fromkeys(("width", "height", "steps"), refused_field(_TEXT_ONLY, 0)),
    },
    ignores_unknown=True,
)
EMBED = FieldTable(
    {
        **_EVERY,
        "input": kinds.TextsOrIds(ids=False),
        "truncate": kinds.BOOLEAN,
        "dimensions": kinds.integer_from(1),
    },
    required=("input",),
    ignores_unknown=True,
)
EMBEDDINGS = FieldTable(
    {**_EVERY, "prompt": kinds.STRING}, required=("prompt",), ignores_unknown=True
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
COPY = FieldTable(
    {"source": MODEL["model"], "destination": _HUB_ID}, required=("source", "destination")
)
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
