"""JSON Schemas of growing nastiness, by name; all of them can be kept to the letter."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def closed(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object with these properties and no others; all of them, unless it is said which."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


def array(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


STRING, INTEGER = {"type": "string", "maxLength": 8}, {"type": "integer"}
NUMBER, BOOLEAN, NULL = {"type": "number"}, {"type": "boolean"}, {"type": "null"}
WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}

PLAIN: dict[str, Schema] = {
    "string or null": {"type": ["string", "null"], "maxLength": 5},
    "const string": {"const": 'a "quoted" \\ backslash'},
    "enum of everything": {"enum": [None, 1, 1.5, "1", [1], {"a": 1}, True]},
    "enum with marks": {"enum": ["<|im_end|>", "<think>", "</s>"]},
    "enum with controls": {"enum": ["tab\t", "line\n", "nul\u0000", "\u007f", "\u2028"]},
    "empty object": closed({}),
}
STRINGS: dict[str, Schema] = {
    "pattern without anchors": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 9},
    "pattern with alternatives": {"type": "string", "pattern": "^(cat|dog|bird)s?$"},
    "pattern that needs escapes": {"type": "string", "pattern": '^["\\\\/]{1,4}$'},
    "pattern with a class of classes": {"type": "string", "pattern": "^[\\w.]{1,5}@[a-z]+\\.com$"},
    "pattern and length": {"type": "string", "pattern": "^[ab]+$", "minLength": 4, "maxLength": 6},
    "two patterns": {"allOf": [{"type": "string", "pattern": "^a.{0,4}$"}, {"pattern": "z$"}]},
    "date-time": {"type": "string", "format": "date-time"},
    "email": {"type": "string", "format": "email", "maxLength": 20},
}
NUMBERS: dict[str, Schema] = {
    "range over zero": {"type": "integer", "minimum": -12, "maximum": 105},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "fraction bounds": {"type": "number", "minimum": -0.25, "maximum": 0.125},
    "multiples of seven": {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 1000},
}
OBJECTS: dict[str, Schema] = {
    "some optional": closed({"a": INTEGER, "b": BOOLEAN, "c": NULL, "d": WORD}, ["b", "d"]),
    "keys that share beginnings": closed({"a": NULL, "ab": NULL, "abc": NULL, "b": NULL}, ["ab"]),
    "keys that need escapes": closed({'"': NULL, "\\": NULL, "\n": NULL, "a/b": NULL, "": NULL}),
    "keys like keywords": closed(
        {"type": WORD, "properties": WORD, "required": WORD, "$ref": WORD}
    ),
    "dictionary of integers": {"type": "object", "additionalProperties": INTEGER},
    "pattern properties beside named ones": {
        "type": "object",
        "properties": {"id": INTEGER},
        "patternProperties": {"^x[0-9]$": BOOLEAN},
        "required": ["id"],
        "additionalProperties": False,
    },
}
ARRAYS: dict[str, Schema] = {
    "array of arrays": array(array(array(BOOLEAN, maxItems=2), maxItems=2), maxItems=2),
    "array of objects": array(closed({"id": INTEGER, "tags": array(WORD, maxItems=2)}), maxItems=3),
    "tuple with a tail": {
        "type": "array",
        "prefixItems": [WORD],
        "items": BOOLEAN,
        "minItems": 2,
        "maxItems": 4,
    },
    "tuple of an old draft": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [INTEGER, WORD],
        "additionalItems": False,
    },
}
CHOICES: dict[str, Schema] = {
    "anyOf objects": {"anyOf": [closed({"a": INTEGER}), closed({"b": WORD}), closed({"a": WORD})]},
    "oneOf by a constant": {
        "oneOf": [
            closed({"kind": {"const": "circle"}, "radius": INTEGER}),
            closed({"kind": {"const": "square"}, "side": INTEGER}),
            closed({"kind": {"const": "point"}}),
        ]
    },
    "allOf objects": {
        "allOf": [
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
            {"type": "object", "properties": {"b": BOOLEAN}, "required": ["b"]},
            {"additionalProperties": {"type": ["integer", "boolean"]}},
        ]
    },
    "allOf narrows": {
        "allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}],
        "maxLength": 4,
    },
    "nested choices": {"anyOf": [{"anyOf": [{"oneOf": [NULL, BOOLEAN]}, WORD]}, array(NULL)]},
    "type list of containers": {
        "type": ["object", "array"],
        "properties": {"a": INTEGER},
        "additionalProperties": False,
        "items": BOOLEAN,
        "maxItems": 2,
    },
}
REFERENCES: dict[str, Schema] = {
    "ref with a sibling": {
        "$defs": {"n": INTEGER},
        "$ref": "#/$defs/n",
        "minimum": 3,
        "maximum": 8,
    },
    "ref into properties": closed({"a": WORD, "b": {"$ref": "#/properties/a"}}),
    "ref with escapes": {"$defs": {"a/b~c": WORD}, "$ref": "#/$defs/a~1b~0c"},
    "ref to an anchor": {"$defs": {"w": {"$anchor": "word", **WORD}}, "$ref": "#word"},
    "recursive list": {
        "$defs": {
            "list": closed({"head": WORD, "tail": {"anyOf": [NULL, {"$ref": "#/$defs/list"}]}})
        },
        "$ref": "#/$defs/list",
    },
    "recursive root": closed({"v": BOOLEAN, "next": {"$ref": "#"}}, ["v"]),
}
REAL: dict[str, Schema] = {
    "person": closed(
        {
            "first_name": STRING,
            "last_name": STRING,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"anyOf": [{"type": "string", "format": "email", "maxLength": 20}, NULL]},
            "address": closed(
                {
                    "street": STRING,
                    "city": STRING,
                    "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                }
            ),
        }
    ),
    "pydantic's": {
        "$defs": {
            "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"},
            "Item": {
                "properties": {
                    "name": {"title": "Name", "type": "string", "maxLength": 6},
                    "color": {"$ref": "#/$defs/Color", "default": "red"},
                    "price": {
                        "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}],
                        "default": None,
                        "title": "Price",
                    },
                },
                "required": ["name"],
                "title": "Item",
                "type": "object",
            },
        },
        "properties": {
            "items": {
                "items": {"$ref": "#/$defs/Item"},
                "title": "Items",
                "type": "array",
                "maxItems": 2,
            }
        },
        "required": ["items"],
        "title": "Order",
        "type": "object",
        "additionalProperties": False,
    },
    "extension and annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/thing",
        "$comment": "says nothing",
        "title": "Thing",
        "description": "a thing",
        "x-order": 3,
        "strict": True,  # as Home Assistant writes it
        **closed({"a": {**INTEGER, "default": 1, "examples": [1, 2], "deprecated": True}}),
    },
}

SCHEMAS: dict[str, Schema] = (
    PLAIN | STRINGS | NUMBERS | OBJECTS | ARRAYS | CHOICES | REFERENCES | REAL
)
