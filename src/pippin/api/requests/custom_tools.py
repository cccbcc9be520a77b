"""OpenAI's custom tools: calls whose argument is one text, perhaps of a grammar. Knows no format.

Models and templates know functions alone. So a custom tool is shown as a function of one string,
and the arguments of its calls are read as that string while they arrive.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pippin.api.requests.body import Body
from pippin.decode.size.check_size import check_part_size
from pippin.types import GrammarPart

INPUT = "input"
SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
_HALF_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")  # the other half has not arrived


def input_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }


def as_function(name: str, description: str | None, grammar: GrammarPart | None) -> dict[str, Any]:
    """The tool as templates want it. A grammar forbids, it does not explain: the model sees it."""
    described = [description] if description else []
    if grammar is not None:
        described.append(f"The input matches this {SYNTAXES[grammar.syntax]}:\n{grammar.text}")
    function: dict[str, Any] = {"name": name, "parameters": input_schema()}
    if described:
        function["description"] = "\n\n".join(described)
    return {"type": "function", "function": function}


def read_grammar(grammar: Body) -> GrammarPart:
    """`syntax` and `definition`. Whether it is a grammar is known when it is compiled."""
    for field in ("syntax", "definition"):
        grammar.require(field)
    syntax = grammar.one_of("syntax", tuple(SYNTAXES))
    definition, param = grammar.string("definition", ""), grammar.name("definition")
    part = GrammarPart("lark" if syntax == "lark" else "regex", definition, param)
    check_part_size(part)
    return part


def arguments_of(input: str) -> str:
    """A past call's input as the arguments of the function that stood for it."""
    return json.dumps({INPUT: input}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    reader = InputReader()
    return reader.feed(arguments) + reader.close()


class InputReader:
    """Arguments in, as they arrive; their text out.

    Where a model wrote other arguments than one string called "input", the input is their JSON.
    """

    def __init__(self) -> None:
        self._held = ""
        self._in_string = False
        self._over = False

    def feed(self, text: str) -> str:
        self._held += text
        if not self._in_string and not self._over:
            self._find_beginning()
        return self._take_characters() if self._in_string else ""

    def close(self) -> str:
        rest, self._held = self._held, ""
        return "" if self._over else rest

    def _find_beginning(self) -> None:
        if begin := _BEGIN.match(self._held):
            self._held = self._held[begin.end() :]
            self._in_string = True

    def _take_characters(self) -> str:
        found = _CHARACTERS.match(self._held)
        assert found is not None
        characters = found[0]
        if half := _HALF_PAIR.search(characters):
            characters = characters[: half.start()]
        self._held = self._held[len(characters) :]
        if self._held.startswith('"'):
            self._in_string, self._over = False, True
        return _without_halves(json.loads(f'"{characters}"', strict=False))


def _without_halves(text: str) -> str:
    """Half of a surrogate pair is no character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
