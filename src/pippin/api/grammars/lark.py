"""Writes grammars in llguidance's Lark. Knows no format and no tool.

Marks (a tokenizer's added tokens) are no text to a grammar: where a string holds one, the grammar
names the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from pippin.decode.json_schema import ONE_LINE
from pippin.text.tokenizer import Tokenizer

ANY_TEXT = "TEXT"


class Lark:
    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = {*tokenizer.added_ids, *tokenizer.special_ids}
        texts = {tokenizer.token_text(id): id for id in ids}
        self._marks = {text: id for text, id in texts.items() if text.strip()}
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._parts = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._rules = [f"{ANY_TEXT}: /(?s:.*)/"]

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    @property
    def num_rules(self) -> int:
        return len(self._rules)

    def drop_rules(self, num_kept: int) -> None:
        """Those of something that turned out not to be expressible."""
        del self._rules[num_kept:]

    def recursive(self, body: Callable[[str], str]) -> str:
        at = len(self._rules)
        name = self.rule("")
        self._rules[at] = f"{name}: {body(name)}"
        return name

    def begins_with_mark(self, text: str) -> bool:
        return self._split(text)[0] in self._marks

    def literal(self, text: str) -> str:
        parts = [
            f"<[{self._marks[part]}]>" if part in self._marks else json.dumps(part)
            for part in self._split(text)
        ]
        return " ".join(parts)

    def until(self, end: str, text: str = "/(?s:.*)/") -> str:
        """Any text, or that of a terminal, up to and with the first `end`."""
        first, *rest = self._split(end)
        if first in self._marks:
            return f"{text} {self.literal(end)}"
        lazy = self.rule(f"{text} {json.dumps(first)}", "[lazy]")
        return " ".join([lazy, *map(self.literal, rest)])

    def json(self, schema: dict[str, object]) -> str:
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE})}")

    def nested(self, lark: str) -> str:
        return self.rule(f"%lark {{\n{lark}\n}}")

    def _split(self, text: str) -> list[str]:
        if not self._marks:
            return [text]
        return [part for part in self._parts.split(text) if part] or [""]


def in_order(lark: Lark, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Items in this order with separators between them; some are required, others may be missing.

    Empty, if there are none.
    """
    # From the last item: what may follow an item, and what may follow none.
    after, before = "", ""
    for item, is_required in reversed(items):
        rest = lark.rule(after) if after else ""
        first, later = f"{item} {rest}", f"{json.dumps(separator)} {item}"
        if is_required:
            after, before = f"{later} {rest}", first
        else:
            after = f"({later})? {rest}"
            before = f"({first} | {lark.rule(before)})" if before else f"({first})?"
    return before


def alternatives(choices: list[str]) -> str:
    return "(" + " | ".join(choices) + ")"
