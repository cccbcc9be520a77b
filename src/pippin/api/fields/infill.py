"""The fields of llama.cpp's `/infill`. Knows no value's use."""

from __future__ import annotations

from typing import Any

from pippin.api.fields import extensions, shared
from pippin.api.fields import value_kinds as kinds
from pippin.api.fields.table import FieldTable, ignored_field, refused_field
from pippin.api.fields.value_kinds import ValueKind
from pippin.api.requests.bounds import MAX_LABEL_CHARS, MAX_LABELS, MAX_MESSAGES

MAX_INDENT = 1_024
_NO_DEADLINE = "timeout ends a reply, in seconds"
_NAMES = {"type": "string", "maxLength": MAX_LABEL_CHARS}


def _are_files(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_MESSAGES and all(map(_is_file, value))


def _is_file(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        return False
    return isinstance(value.get("filename", ""), str)


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= MAX_LABELS
        and all(isinstance(name, str) and len(name) <= MAX_LABEL_CHARS for name in value)
    )


INFILL = FieldTable(
    {
        **shared.MODEL,
        "input_prefix": kinds.STRING,
        "input_suffix": kinds.STRING,
        "input_extra": ValueKind(
            f"a list of at most {MAX_MESSAGES:,} objects with a text, and perhaps a filename",
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"text": {"type": "string"}, "filename": {"type": "string"}},
                    "required": ["text"],
                },
                "maxItems": MAX_MESSAGES,
            },
            _are_files,
        ),
        "prompt": kinds.STRING,
        "n_predict": kinds.integer_from(-1),
        "n_indent": kinds.integer_from(0, MAX_INDENT),
        "n_cmpl": kinds.integer_from(1, shared.MAX_CHOICES),
        "return_tokens": kinds.BOOLEAN,
        "response_fields": ValueKind(
            f"a list of at most {MAX_LABELS} strings of at most {MAX_LABEL_CHARS:,} characters",
            {"type": "array", "items": _NAMES, "maxItems": MAX_LABELS},
            _are_names,
        ),
        **shared.pick(
            shared.SAMPLING,
            *("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
            *("logit_bias", "seed", "stop", "ignore_eos", "speculate", "json_schema"),
        ),
        "repeat_penalty": shared.SAMPLING["repetition_penalty"],
        "grammar": shared.SAMPLING["ebnf"],
        **shared.STREAM,
        **shared.SERVING,
        **extensions.HINTS,
        **extensions.SAMPLERS,
        "t_max_predict_ms": ignored_field(_NO_DEADLINE),
        "sse_ping_interval": ignored_field("the server sets it"),
        "n_probs": refused_field("use /v1/completions for log probabilities", 0),
        "post_sampling_probs": refused_field("use /v1/completions for log probabilities", False),
        "lora": refused_field("this server loads no adapters", []),
    },
    required=("input_prefix", "input_suffix"),
)
