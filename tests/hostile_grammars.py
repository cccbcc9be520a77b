"""Grammars that ask a compiler for more than their text shows, by family and by how much."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from pippin.types import GrammarSpec

Family = Callable[[int], GrammarSpec]


def _schema(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def _definitions(size: int, refer: Callable[[dict[str, str]], Any]) -> GrammarSpec:
    names = {str(i): refer({"$ref": f"#/$defs/{i + 1}"}) for i in range(size)}
    return _schema({"$ref": "#/$defs/0", "$defs": names | {str(size): {"type": "integer"}}})


def _rules(size: int, body: str, last: str = '"a"', *, name: str = "r") -> GrammarSpec:
    """`body` has {} where the next rule is named."""
    lines = [f"{name}{i}: {body.format(*2 * (f'{name}{i + 1}',))}" for i in range(size)]
    return GrammarSpec("ebnf", "\n".join([f"start: {name}0", *lines, f"{name}{size}: {last}", ""]))


def _gbnf(size: int, body: str) -> GrammarSpec:
    lines = [f"r{i} ::= {body.format(*2 * (f'r{i + 1}',))}" for i in range(size)]
    return GrammarSpec("ebnf", "\n".join(["root ::= r0", *lines, f'r{size} ::= "a"', ""]))


def _nested(kind: Any, size: int, opening: str, inner: str, closing: str) -> GrammarSpec:
    before, after = ("start: ", "\n") if kind == "ebnf" else ("", "")
    return GrammarSpec(kind, before + opening * size + inner + closing * size + after)


# Each: so large that it must be refused, and so small that it must be compiled.
FAMILIES: dict[str, tuple[Family, int, int]] = {
    "chained rules": (lambda n: _rules(n, "{}"), 5_000, 300),
    "chained rules with choices": (lambda n: _rules(n, '"a" {} | "b"'), 3_000, 300),
    "chained terminals": (lambda n: _rules(n, "{}", name="T"), 5_000, 300),
    "terminals twice in each other": (lambda n: _rules(n, "{} {}", name="T"), 40, 10),
    "many rules": (
        lambda n: GrammarSpec("ebnf", "start: r0\n" + "".join(f'r{i}: "a"\n' for i in range(n))),
        9_000,
        500,
    ),
    "nested groups": (lambda n: _nested("ebnf", n, "(", '"a"', ")"), 5_000, 20),
    "repeated repetitions": (
        lambda n: GrammarSpec("ebnf", f'start: (("a"{{{n}}}){{{n}}}){{{n}}}\n'),
        1_000,
        5,
    ),
    "a chain in a nested grammar": (
        lambda n: GrammarSpec("ebnf", f"start: n\nn: %lark {{\n{_rules(n, '{}').text}}}\n"),
        5_000,
        300,
    ),
    "a schema in a grammar": (
        lambda n: GrammarSpec("ebnf", f"start: %json {_nested_items(n)}\n"),
        800,
        30,
    ),
    "chained rules, GBNF": (lambda n: _gbnf(n, "{}"), 14_500, 300),
    "rules twice in each other, GBNF": (lambda n: _gbnf(n, "{} {}"), 40, 10),
    "a repeated expression": (
        lambda n: GrammarSpec("regex", f"((a{{{n}}}){{{n}}}){{{n}}}"),
        100,
        9,
    ),
    "a nested expression": (lambda n: _nested("regex", n, "(", "a", ")*b"), 5_000, 20),
    "many alternatives": (
        lambda n: GrammarSpec("regex", "|".join(map(str, range(n)))),
        40_000,
        500,
    ),
    "chained references": (
        lambda n: _definitions(n, lambda next: {"properties": {"a": next}}),
        2_000,
        200,
    ),
    "references alone": (lambda n: _definitions(n, lambda next: next), 4_000, 300),
    "a chain of anchors": (
        lambda n: _schema(
            {
                "$ref": "#a0",
                "$defs": {
                    str(i): {"$anchor": f"a{i}", "items": {"$ref": f"#a{i + 1}"}} for i in range(n)
                }
                | {"last": {"$anchor": f"a{n}", "type": "null"}},
            }
        ),
        2_000,
        100,
    ),
    "nested properties": (
        lambda n: _nested("json_schema", n, '{"properties":{"a":', "{}", "}}"),
        990,
        30,
    ),
    "nested constants": (lambda n: GrammarSpec("json_schema", _nested_constant(n)), 900, 60),
    "many properties": (
        lambda n: _schema({"properties": {f"p{i}": {"type": "null"} for i in range(n)}}),
        12_000,
        200,
    ),
    "many values": (lambda n: _schema({"enum": [f"v{i}" for i in range(n)]}), 30_000, 2_000),
    "patterns of names": (
        lambda n: _schema({"patternProperties": {f"^p{i}$": {} for i in range(n)}}),
        1_000,
        20,
    ),
    "a pattern that is repeated": (
        lambda n: _schema({"type": "string", "pattern": f"^(([a-z]{{{n}}},){{{n}}};){{{n}}}$"}),
        1_000,
        5,
    ),
}


def _nested_items(size: int) -> str:
    return '{"items":' * size + "{}" + "}" * size


def _nested_constant(size: int) -> str:
    return '{"const":' + "[" * size + "]" * size + "}"


def draw_hostile(draw: random.Random) -> GrammarSpec:
    """Of any family, around and beyond what is allowed; never the same text twice."""
    family, large, small = draw.choice(list(FAMILIES.values()))
    spec = family(int(small * (3 * large / small) ** draw.random()))
    number = draw.getrandbits(64)
    if spec.kind == "json_schema":
        return GrammarSpec(spec.kind, f'{{"title":"{number}",{spec.text[1:]}')
    if spec.kind == "regex":
        return GrammarSpec(spec.kind, f"{number}{spec.text}")
    comment = "//" if spec.text.startswith("start") else "#"
    return GrammarSpec(spec.kind, f"{spec.text}{comment} {number}\n")
