"""Constraints of a reply: `response_format`, and SGLang's fields. Knows no grammars.

Sizes are checked here; whether a schema can be enforced is known when it is compiled.
"""

from __future__ import annotations

import json

from pippin.api.requests.body import Body
from pippin.decode.expressed_schema import expressed
from pippin.decode.size.check_size import check_nesting_of, check_size
from pippin.types import GrammarSpec

FIELDS = ("response_format", "json_schema", "regex", "ebnf")
ANY_OBJECT = json.dumps({"type": "object"})


def read_structure(body: Body, max_bytes: int, *, strict: bool) -> GrammarSpec | None:
    """`strict`: a keyword of a schema that cannot be enforced stays, and is refused."""
    asked = [field for field in FIELDS if _asks(body, field)]
    if len(asked) > 1:
        raise body.error(asked[1], f"and {asked[0]} both constrain the reply; send one of them")
    if not asked:
        return None
    field = asked[0]
    spec = _read(body, field)
    nbytes = len(spec.text.encode())
    if nbytes > max_bytes:
        limit = f"at most {max_bytes:,} are allowed (--max-schema-bytes)"
        raise body.error(field, f"has {nbytes:,} bytes; {limit}")
    check_size(spec, field)
    if spec.kind != "json_schema" or strict or _is_strict(body, field):
        return spec
    return _lenient(spec, body, field)


def _lenient(spec: GrammarSpec, body: Body, field: str) -> GrammarSpec:
    """Without keywords that cannot be enforced: they are listed in a header of the response."""
    try:
        schema = json.loads(spec.text)
    except ValueError:
        return spec  # found out, and named, where schemas are read
    if not isinstance(schema, dict):
        return spec
    left_out: dict[str, None] = {}
    found = expressed(schema, lambda keyword: left_out.setdefault(keyword))
    if not left_out:
        return spec
    for keyword in left_out:
        body.leniency.ignore(f"{body.name(field)}.{keyword}", "it cannot be enforced")
    return GrammarSpec("json_schema", json.dumps(found, ensure_ascii=False))


def _is_strict(body: Body, field: str) -> bool:
    if field != "response_format":
        return False
    described = body.required_object(field).object("json_schema")
    return described is not None and described.boolean("strict", False)


def _read(body: Body, field: str) -> GrammarSpec:
    if field == "response_format":
        return GrammarSpec("json_schema", _response_format(body.required_object(field)))
    if field == "json_schema":
        return GrammarSpec("json_schema", _schema(body, field))
    return GrammarSpec("regex" if field == "regex" else "ebnf", body.required_string(field))


def _asks(body: Body, field: str) -> bool:
    if field == "response_format" and body.has(field):
        return bool(body.required_object(field).get("type") != "text")
    return body.has(field)


def _response_format(given: Body) -> str:
    given.check_known({"type", "json_schema", "schema"})
    kind = given.get("type")
    if given.has("schema") and kind in ("json_object", "json_schema"):  # llama.cpp's and SGLang's
        if given.has("json_schema"):
            raise given.error("schema", "and json_schema are the same; send one of them")
        return _schema(given, "schema")
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise given.unsupported("type", "text, json_object and json_schema are supported")
    described = given.required_object("json_schema")
    described.check_known({"name", "description", "schema", "strict"})
    described.required_string("name")
    described.string("description", None)
    described.boolean("strict", False)
    described.require("schema")
    return _schema(described, "schema")


def _schema(body: Body, field: str) -> str:
    """An object, or the JSON of one as SGLang takes it."""
    value = body.get(field)
    if isinstance(value, dict):
        check_nesting_of(value, body.name(field))
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return value
    raise body.wrong(field, "a JSON Schema: an object, or its JSON")
