"""How large a grammar is that is written in Lark, as llguidance reads it, or in GBNF.

Terminals are inlined where they are named, rules are not. Knows what can be repeated, named and
nested, and nothing else of the languages: a text that is no grammar passes.
"""

from __future__ import annotations

import json
import re

from pippin.decode.size.groups import MOST, Groups
from pippin.decode.size.references import in_order
from pippin.decode.size.regex_size import check_regex_size
from pippin.decode.size.schema_size import check_schema_size
from pippin.decode.size.size_limits import (
    MAX_ALTERNATIVES,
    MAX_EXPANSION,
    MAX_NESTING,
    MAX_RULES,
    TooLarge,
    check_limit,
    check_nesting,
)

# llguidance's own test of which language a text is in.
_IS_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:)", re.MULTILINE)
# Nothing here looks twice at the same characters: what is never closed reaches to the end.
_COMMON = (
    r'(?P<text>"(?:[^"\\\n]|\\.)*"?)'
    r"|(?P<open>\()|(?P<close>\))|(?P<bar>\|)"
    r"|\{\s{0,9}(?P<least>\d+)\s{0,9}(?:,\s{0,9}(?P<most>\d*)\s{0,9})?\}"
)
_LARK = re.compile(
    r"(?P<skip>//[^\n]*|\#[^\n]*)"
    r"|(?P<json>%json\s{0,9}(?=\{))|(?P<nested>%lark\s{0,9}\{)|(?P<end>\})"
    r"|(?P<rule>[?!]?[A-Za-z_][\w-]*(?:\.-?\d+)?(?:\[[^\]\n]{0,500}\])?[ \t]{0,99}:)"
    r"|(?P<name>[A-Za-z_][\w-]*)"
    r"|(?P<regex>/(?:[^/\\\n]|\\.)+/?)"
    r"|~\s{0,9}(?P<from>\d+)(?:\s{0,9}\.\.\s{0,9}(?P<to>\d+))?"
    rf"|{_COMMON}|(?P<open_maybe>\[)|(?P<close_maybe>\])|[\s\S]",
)
_GBNF = re.compile(
    r"(?P<skip>\#[^\n]*)"
    r"|(?P<rule>[\w-]+[ \t]{0,99}::=)|(?P<name>[\w-]+)"
    r"|(?P<regex>\[(?:[^\]\\]|\\.)*\]?)"
    rf"|{_COMMON}|[\s\S]",
)
_DECODER = json.JSONDecoder()


class _Grammar:
    """Rules by name; a grammar that is nested in another has a number before its names."""

    def __init__(self) -> None:
        self.rules: dict[str, Groups] = {}
        self.num_alternatives = 0
        self._scopes = [0]
        self._num_scopes = 1
        self.body = Groups()  # of the rule that is read; directives before the first have one too

    def scoped(self, name: str) -> str:
        return f"{self._scopes[-1]}:{name}"

    def begin(self, name: str) -> None:
        self.num_alternatives += 1
        self.body = self.rules.setdefault(self.scoped(name), Groups())
        check_limit("rules", len(self.rules), MAX_RULES)

    def enter(self) -> None:
        """A grammar inside a rule."""
        self._scopes.append(self._num_scopes)
        self._num_scopes += 1
        check_nesting(len(self._scopes) - 1)
        self.body.add(self.scoped("start"))

    def leave(self) -> None:
        if len(self._scopes) > 1:
            self._scopes.pop()


def check_lark_size(text: str) -> None:
    is_lark = _IS_LARK.search(text) is not None
    grammar = _read_lark(text) if is_lark else _read_gbnf(text)
    check_limit("alternatives", grammar.num_alternatives, MAX_ALTERNATIVES)
    _check_references(grammar, is_lark)


def _read_lark(text: str) -> _Grammar:
    grammar, at = _Grammar(), 0
    while (token := _LARK.match(text, at)) is not None:
        at = token.end()
        match token.lastgroup:
            case "rule":
                grammar.begin(re.split(r"[.\[:\s]", token[0].lstrip("?!"), maxsplit=1)[0])
            case "regex":
                check_regex_size(token[0][1:])
                grammar.body.add()
            case "json":
                at = _skip_schema(text, at)
                grammar.body.add()
            case "nested":
                grammar.enter()
            case "end":
                grammar.leave()
            case "from" | "to":
                grammar.body.repeat(token["to"] or token["from"])
            case _:
                _common(grammar, token)
    return grammar


def _read_gbnf(text: str) -> _Grammar:
    grammar = _Grammar()
    for token in _GBNF.finditer(text):
        if token.lastgroup == "rule":
            grammar.begin(token[0][:-3].strip())
        elif token.lastgroup == "regex":
            grammar.body.add()
        else:
            _common(grammar, token)
    return grammar


def _common(grammar: _Grammar, token: re.Match[str]) -> None:
    match token.lastgroup:
        case "name":
            grammar.body.add(grammar.scoped(token[0]))
        case "text":
            grammar.body.add(size=max(1, len(token[0]) - 2))
        case "open" | "open_maybe":
            grammar.body.open()
        case "close" | "close_maybe":
            grammar.body.close()
        case "bar":
            grammar.num_alternatives += 1
        case "least" | "most":
            grammar.body.repeat(token["most"] or token["least"])


def _skip_schema(text: str, at: int) -> int:
    """The end of the schema that begins there."""
    try:
        schema, end = _DECODER.raw_decode(text, at)
    except RecursionError as error:
        raise TooLarge(f"a schema in it is nested deeper than {MAX_NESTING} levels") from error
    except ValueError:
        return len(text)  # no grammar: llguidance names the error and reads no further either
    check_schema_size(schema)
    return end


def _check_references(grammar: _Grammar, is_lark: bool) -> None:
    named: dict[str, list[str]] = {}
    uses: dict[str, list[tuple[str | None, int]]] = {}
    for name, body in grammar.rules.items():
        uses[name] = list(body.written_out())
        named[name] = [each for each, _ in uses[name] if each in grammar.rules]
    sizes: dict[str, int] = {}  # of what is inlined where it is named
    for name in in_order(grammar.rules, named.__getitem__):
        inner = sum(min(MOST, count * sizes.get(each or "", 1)) for each, count in uses[name])
        check_limit("characters and names, with repetitions written out", inner, MAX_EXPANSION)
        # GBNF has no terminals: a rule that names no rule of rules becomes one.
        bare = name.partition(":")[2].lstrip("_")
        if bare[:1].isupper() if is_lark else all(each in sizes for each in named[name]):
            sizes[name] = inner
