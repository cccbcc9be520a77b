"""Fields that other servers added to these APIs, and their clients send. Knows no dialect.

Those that have a field of ours in their place are honoured as that field; see
`requests/extensions.py`. The others cannot change a reply here.
"""

from __future__ import annotations

from pippin.api.fields import value_kinds as kinds
from pippin.api.fields.shared import EFFORT, SAMPLING, Fields
from pippin.api.fields.table import ignored_field, members, refused_field
from pippin.api.fields.value_kinds import ValueKind

_ROUTING = "requests are not routed to other servers"
_ONE_MODEL = "the model and its context length are set when the server starts"
# Ollama's options, which Open WebUI sends to every server as they are set.
_LOADING = (
    *("keep_alive", "num_ctx", "num_gpu", "num_batch", "num_thread", "use_mmap", "use_mlock"),
)
_OPEN_WEBUI = (
    *("background_tasks", "chat_id", "features", "files", "filter_ids", "id", "model_item"),
    *("params", "parent_id", "tool_ids", "tool_servers", "variables"),
)
_CHOICES = ValueKind("a list of strings", {"type": "array", "items": {"type": "string"}})

RENAMED = {  # what means the same here
    "repeat_penalty": "repetition_penalty",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "ebnf",
}
SAME: Fields = {other: SAMPLING[ours] for other, ours in RENAMED.items()}
STRUCTURED: Fields = {
    "guided_choice": _CHOICES,
    "structured_outputs": members(
        json=SAMPLING["json_schema"],
        regex=SAMPLING["regex"],
        grammar=SAMPLING["ebnf"],
        choice=_CHOICES,
        json_object=kinds.BOOLEAN,
        disable_any_whitespace=ignored_field("JSON is written on one line"),
        disable_additional_properties=ignored_field("objects are closed"),
        whitespace_pattern=ignored_field("JSON is written on one line"),
        disable_fallback=ignored_field("there is one grammar engine"),
    ),
}
REASONING: Fields = {
    "enable_thinking": kinds.BOOLEAN,
    "think": kinds.BOOLEAN,
    "thinking": ValueKind(
        "true, false, or an object with a `type` of enabled, disabled, adaptive or auto",
        {"type": ["boolean", "object"]},
        lambda value: isinstance(value, bool | dict),
    ),
    "reasoning": members(
        effort=EFFORT,
        enabled=kinds.BOOLEAN,
        exclude=ignored_field("reasoning is always returned", False),
        max_tokens=ignored_field("reasoning has no budget of its own"),
        summary=ignored_field("reasoning is returned whole"),
    ),
    "include_reasoning": ignored_field("reasoning is always returned", True),
    "separate_reasoning": ignored_field("reasoning is always returned apart", True),
    "stream_reasoning": ignored_field("reasoning is always streamed", True),
    "reasoning_format": ignored_field("reasoning is always returned apart"),
    "thinking_budget": ignored_field("reasoning has no budget of its own"),
}
HINTS: Fields = {
    **{name: ignored_field(_ONE_MODEL) for name in _LOADING},
    "num_keep": ignored_field("a prompt is never shortened"),
    **{name: ignored_field("it is Open WebUI's own") for name in _OPEN_WEBUI},
    **{
        name: ignored_field(_ROUTING)
        for name in ("provider", "models", "route", "transforms", "plugins", "session_id")
    },
    "usage": ignored_field("usage is always returned"),
    "request_id": ignored_field("the request's id is its x-request-id header"),
    "rid": ignored_field("the request's id is its x-request-id header"),
    "skip_special_tokens": ignored_field("special tokens are not in a reply's text", True),
    "spaces_between_special_tokens": ignored_field("special tokens are not in a reply's text"),
    "guided_decoding_backend": ignored_field("there is one grammar engine"),
    "guided_whitespace_pattern": ignored_field("JSON is written on one line"),
    "repeat_last_n": ignored_field("penalties count the whole text"),
    "cache_prompt": ignored_field("every prefix is cached", True),
    "id_slot": ignored_field("the server assigns slots", -1),
    "timings_per_token": ignored_field("the log has a request's times", False),
    "return_progress": ignored_field("the page at / shows progress", False),
    "litellm_metadata": ignored_field("it is LiteLLM's own"),
    "extra_headers": ignored_field("it is the client's own"),
}
_NO_SAMPLER = "there is no such sampler"
_OF_NO_SAMPLER = "it sets a sampler that there is not"
SAMPLERS: Fields = {  # of llama.cpp and others: accepted where they are off
    "samplers": ignored_field("samplers run in one order"),
    **{
        name: ignored_field(_OF_NO_SAMPLER)
        for name in (
            *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
            *("dynatemp_exponent", "mirostat_eta", "mirostat_tau", "xtc_threshold"),
        )
    },
    **{
        name: refused_field(_NO_SAMPLER, 0, 0.0)
        for name in ("dry_multiplier", "dynatemp_range", "top_a", "xtc_probability")
    },
    **{name: refused_field(_NO_SAMPLER, 1, 1.0) for name in ("tfs", "tfs_z", "typical_p")},
    "mirostat": refused_field(_NO_SAMPLER, 0),
    "min_keep": refused_field(_NO_SAMPLER, 0),
}
GENERATION: Fields = {**SAME, **STRUCTURED, **HINTS, **SAMPLERS}  # of chat and text completions
