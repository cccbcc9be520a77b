"""Writes calls as a format's own row says, and makes up many of them, good and bad."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from pippin.text.parsers.base import CallFormat
from pippin.text.parsers.formats import TOOL_FORMATS

Call = tuple[str, dict[str, Any]]
JSON_TYPES = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
# Calls that can be told from content only at the beginning of a reply.
WITHOUT_A_MARK = ("llama3", "pythonic")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "ключ": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "tree": {"$ref": "#/$defs/tree"},
                    "list": {"type": "array", "items": {}},
                },
                "$defs": {"tree": {"type": "object"}},
            },
        },
    }
    for name in ("get_weather", "write-file", "mcp__search.v2", "f")
]
NAMES = [tool["function"]["name"] for tool in TOOLS]
STRINGS = [
    "",
    "Tokyo",
    "東京 😀 é",
    'say "hi" \\ and \\n',
    "line\nbreak\n\n\tindent\n",
    "  spaces  ",
    "<b>&amp;</b> {x} [y] `z`",
    "a, b: c; d}",
    "</parameter> is only text",
    "null",
    "12",
]
WORDS = ["Let me look.", "Überlegung: 3 < 4\n", " and then {", "[1] `x` <b>", "Fertig 😀."]


def write_calls(format: str, calls: list[Call]) -> str:
    row = TOOL_FORMATS[format]
    written = [
        row.call.replace("{number}", str(number))
        .replace("{name}", name)
        .replace("{arguments}", write_arguments(row, arguments))
        for number, (name, arguments) in enumerate(calls)
    ]
    return row.opening + row.separator.join(written) + row.closing


def write_arguments(row: CallFormat, arguments: dict[str, Any]) -> str:
    match row.style:
        case "json":
            return json.dumps(arguments, ensure_ascii=False)
        case "tags":
            return "".join(
                row.before_key
                + key
                + row.before_value(JSON_TYPES[type(value)])
                + _bare(value)
                + row.after_value
                for key, value in arguments.items()
            )
        case "keywords":
            items = arguments.items()
            return ", ".join(
                f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in items
            )
        case "bare_keys":
            return _with_bare_keys(arguments, row.quote)


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _with_bare_keys(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        members = (f"{key}:{_with_bare_keys(item, quote)}" for key, item in value.items())
        return "{" + ",".join(members) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_with_bare_keys(item, quote) for item in value) + "]"
    if isinstance(value, str):
        return quote + value + quote
    return json.dumps(value)


@dataclass(frozen=True)
class Example:
    text: str
    calls: list[Call] | None = None  # None: what is to be found in it is left open
    letters: str = ""  # of the content around the calls, without white space


class Maker:
    """Replies in one format, the same for the same seed."""

    def __init__(self, format: str, seed: int) -> None:
        self.random = random.Random(f"{format} {seed}")
        self.format = format

    def call(self) -> Call:
        makers = {
            "text": self._string,
            "ключ": self._string,
            "count": lambda: self.random.choice([0, -7, 2**53 + 1, 10**40, 12345678901234567890]),
            "ratio": lambda: self.random.choice([0.5, -1e-9, 3, 1e300]),
            "flag": lambda: self.random.random() < 0.5,
            "maybe": lambda: self.random.choice([None, 5]),
            "tree": lambda: {"a": [self._string(), {"b": None}], "c_d": {"e": True}},
            "list": lambda: [1, [2, [self._string()]], {}, 2**70],
        }
        keys = self.random.sample(list(makers), self.random.randint(0, 4))
        return self.random.choice(NAMES), {key: makers[key]() for key in keys}

    def good(self) -> Example:
        """Calls, perhaps with text before and after them."""
        calls = [self.call() for _ in range(self.random.randint(1, 3))]
        text = write_calls(self.format, calls)
        if self.format in WITHOUT_A_MARK:
            return Example(text, calls)
        before = self.random.choice(["", *WORDS])
        after = "" if self.format == "harmony" else self.random.choice(["", *WORDS])
        letters = "".join((before + after).split())
        if self.format == "harmony" and before:
            before = f"<|channel|>final<|message|>{before}<|end|><|start|>assistant"
        return Example(before + text + after, calls, letters)

    def cut(self) -> Example:
        text = self.good().text
        return Example(text[: self.random.randint(1, len(text))])

    def malformed(self) -> Example:
        """A few characters changed, left out or doubled."""
        text = list(self.good().text)
        for _ in range(self.random.randint(1, 4)):
            at = self.random.randrange(len(text))
            text[at] = self.random.choice(["", text[at] * 2, *'"{}[]<>,:\\\n x'])
        return Example("".join(text))

    def _string(self) -> str:
        string = self.random.choice(STRINGS)
        return string.replace("</parameter>", "") if self.random.random() < 0.5 else string


@cache
def examples(format: str, num: int = 200) -> list[Example]:
    maker = Maker(format, 0)
    kinds = [maker.good, maker.good, maker.cut, maker.malformed]
    return [kinds[i % len(kinds)]() for i in range(num)]
