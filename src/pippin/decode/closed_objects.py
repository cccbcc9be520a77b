"""Schemas whose objects hold what they declare and no more. Knows no tokens.

JSON Schema allows properties that a schema does not name, and a model that may add some does not
stop adding. So a reply has none unless the schema has `"additionalProperties": true`: the reply is
valid either way.
"""

from __future__ import annotations

from typing import Any

from pippin.decode.subschemas import Schema, with_subschemas

# With one of these the schema itself decides what an object may hold besides its properties.
_DECIDES = ("additionalProperties", "patternProperties", "minProperties")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")


def closed(schema: Any) -> Any:
    """The schema, closed; unchanged where it combines schemas, which would exclude each other.

    Recurses: the nesting must have been checked (`check_schema`).
    """
    return schema if _combines(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = with_subschemas(schema, _closed)
    if _is_complete(found):
        found["additionalProperties"] = False
    return found


def _is_complete(schema: Schema) -> bool:
    """Whether its properties are all that an object needs."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    return all(name in properties for name in required) and not any(k in schema for k in _DECIDES)


def _combines(schema: Any) -> bool:
    """Whether an object may have to be of several schemas at once, somewhere."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, dict):
        return False
    several = isinstance(parts := schema.get("allOf"), list) and len(parts) > 1
    beside = "properties" in schema and any(key in schema for key in _COMBINED)
    return several or beside or any(map(_combines, schema.values()))
