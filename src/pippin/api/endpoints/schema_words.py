"""What schemas of requests are made of. Knows no field by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pippin.api.model_info import ModelInfo
from pippin.api.requests.bounds import MAX_LABEL_CHARS
from pippin.api.requests.fields import Refusal

Schema = dict[str, Any]
ANYTHING: Schema = {}
BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
OBJECTS: Schema = {"type": "array", "items": OBJECT}


def body_of(
    honoured: Iterable[str],
    refused: Mapping[str, Refusal],
    fields: Mapping[str, Schema],
    *,
    required: tuple[str, ...] = (),
) -> Schema:
    """Of fields that are refused only values that ask for nothing are left; null is "not sent"."""
    properties = {
        name: fields.get(name, ANYTHING)
        if name in required
        else nullable(fields.get(name, ANYTHING))
        for name in sorted(honoured)
    }
    for name, refusal in sorted(refused.items()):
        properties[name] = {"enum": [*refusal.neutral, None], "description": refusal.why}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": {"type": "null"},
    }


def object_of(**properties: Schema) -> Schema:
    known = {name: nullable(schema) for name, schema in properties.items()}
    return {"type": "object", "properties": known, "additionalProperties": {"type": "null"}}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


def some(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def label(most: int = MAX_LABEL_CHARS) -> Schema:
    return {"type": "string", "maxLength": most}


def ids(model: ModelInfo) -> Schema:
    return {"type": "array", "items": integer(0, model.vocab_size - 1)}


def integer(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}
