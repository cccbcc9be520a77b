"""How large grammars may be, by name.

docs/api/structured-output.md lists these. A grammar within all of them compiles in well under a
second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pippin.errors import RequestError
from pippin.types import GrammarPart, GrammarSpec

MAX_PART_BYTES = 262_144  # of a custom tool's grammar; --max-schema-bytes is of the whole
MAX_NESTING = 100  # levels of brackets, or of JSON; llguidance's reader of JSON ends at 128
MAX_RULES = 5_000  # rules and terminals of a grammar
MAX_OBJECTS = 10_000  # of JSON, in a schema
MAX_ALTERNATIVES = 20_000  # of all rules together; or values of enums and schemas to choose from
MAX_REFERENCE_DEPTH = 1_000  # rules that name each other in a chain; values of JSON along `$ref`s
MAX_EXPANSION = 262_144  # characters, classes and names, once repetitions are written out
MAX_PATTERN_PROPERTIES = 100  # of one object: each is compared with all others


class TooLarge(ValueError):
    """The message names what exceeds a limit, and the limit."""


def check_limit(what: str, amount: int, limit: int) -> None:
    if amount > limit:
        raise TooLarge(f"{amount:,} {what}, at most {limit:,} are allowed")


def check_nesting(levels: int) -> None:
    if levels > MAX_NESTING:
        raise TooLarge(f"nested deeper than {MAX_NESTING:,} levels")


Name = TypeVar("Name", bound=Hashable)


def in_order(names: Iterable[Name], refers: Callable[[Name], Sequence[Name]]) -> list[Name]:
    """Every name after those that it refers to, but for those that refer back to it.

    Raises if the chain on the way to one of them is too long.
    """
    found: list[Name] = []
    seen: set[Name] = set()
    for first in names:
        if first in seen:
            continue
        seen.add(first)
        chain = [(first, iter(refers(first)))]
        while chain:
            name, rest = chain[-1]
            inner = next((each for each in rest if each not in seen), None)
            if inner is None:
                chain.pop()
                found.append(name)
            else:
                seen.add(inner)
                chain.append((inner, iter(refers(inner))))
                check_limit("references in a chain", len(chain) - 1, MAX_REFERENCE_DEPTH)
    return found


MOST = MAX_EXPANSION + 1  # larger numbers count as equal


class Groups:
    """Filled in the order of the text."""

    def __init__(self) -> None:
        self._parents = [0]
        self._counts = [1]  # how often a group or an atom is repeated
        self._atoms: list[tuple[int, str | None, int]] = []
        self._open = [0]
        self._last = 0

    def open(self) -> None:
        self._open.append(self._new())
        check_nesting(len(self._open) - 1)

    def close(self) -> None:
        if len(self._open) > 1:  # else llguidance reports it: nothing is open
            self._last = self._open.pop()

    def add(self, name: str | None = None, size: int = 1) -> None:
        """An atom: a reference, or so many characters."""
        self._last = self._new()
        self._atoms.append((self._last, name, size))

    def repeat(self, times: str) -> None:
        """Repeat the last group or atom. `times` are digits."""
        count = MOST if len(times) > len(str(MOST)) else int(times or 1)
        self._counts[self._last] = min(MOST, self._counts[self._last] * max(1, count))

    def written_out(self) -> Iterator[tuple[str | None, int]]:
        """Each atom, and its size times its repetitions."""
        total = list(self._counts)
        for node in range(1, len(total)):
            total[node] = min(MOST, total[node] * total[self._parents[node]])
        for node, name, size in self._atoms:
            yield name, min(MOST, total[node] * size)

    def _new(self) -> int:
        self._parents.append(self._open[-1])
        self._counts.append(1)
        return len(self._counts) - 1


# llguidance's own test of which language a text is in.
_IS_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:)", re.MULTILINE)
# Nothing here looks twice at the same characters: what is never closed reaches to the end.
_REGEX = re.compile(
    r"(?P<plain>[^\\[(){}*+?|]+)"
    r"|(?P<one>\\(?:[pPx]\{[^}]{0,64}\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]?)"
    r"|(?P<open>\((?:\?(?:P?<\w{1,64}>|[a-zA-Z-]{0,16}:))?)|(?P<close>\))"
    r"|\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|(?P<bar>\|)|[*+?{}\\]",
    re.DOTALL,
)
_COMMON = (
    r'(?P<text>"(?:[^"\\\n]|\\.)*"?)'
    r"|(?P<open>\()|(?P<close>\))|(?P<bar>\|)"
    r"|\{\s{0,9}(?P<least>\d+)\s{0,9}(?:,\s{0,9}(?P<most>\d*)\s{0,9})?\}"
)
_LARK = re.compile(
    r"(?P<skip>//[^\n]*|\#[^\n]*)"
    r"|(?P<json>%json\s{0,9}(?=\{))|(?P<nested>%lark\s{0,9}\{)|(?P<end>\})"
    r"|(?P<rule>[?!]?(?P<ruled>[A-Za-z_][\w-]*)(?:\.-?\d+)?(?:\[[^\]\n]{0,500}\])?[ \t]{0,99}:)"
    r"|(?P<name>[A-Za-z_][\w-]*)"
    r"|(?P<regex>/(?:[^/\\\n]|\\.)+/?)"
    r"|~\s{0,9}(?P<from>\d+)(?:\s{0,9}\.\.\s{0,9}(?P<to>\d+))?"
    rf"|{_COMMON}|(?P<open_maybe>\[)|(?P<close_maybe>\])|[\s\S]",
)
_GBNF = re.compile(
    r"(?P<skip>\#[^\n]*)"
    r"|(?P<rule>(?P<ruled>[\w-]+)[ \t]{0,99}::=)|(?P<name>[\w-]+)"
    r"|(?P<one>\[(?:[^\]\\]|\\.)*\]?)"
    rf"|{_COMMON}|[\s\S]",
)
_DECODER = json.JSONDecoder()


class _Grammar:
    """Rules by name; a grammar that is nested in another has a number before its names."""

    def __init__(self, text: str, tokens: re.Pattern[str]) -> None:
        self.rules: dict[str, Groups] = {}
        self.num_alternatives = 0
        self.body = Groups()  # of the rule that is read; a regex and directives have one too
        scopes, num_scopes, at = [0], 1, 0
        while (token := tokens.match(text, at)) is not None:
            at = token.end()
            match token.lastgroup:
                case "rule":
                    self.num_alternatives += 1
                    self.body = self.rules.setdefault(f"{scopes[-1]}:{token['ruled']}", Groups())
                    check_limit("rules", len(self.rules), MAX_RULES)
                case "name":
                    self.body.add(f"{scopes[-1]}:{token[0]}")
                case "plain":
                    self.body.add(size=len(token[0]) - 1)
                    self.body.add()  # what a repetition behind it repeats
                case "text":
                    self.body.add(size=max(1, len(token[0]) - 2))
                case "one":
                    self.body.add()
                case "regex":
                    check_regex_size(token[0][1:])
                    self.body.add()
                case "json":
                    at = _skip_schema(text, at)
                    self.body.add()
                case "nested":
                    scopes.append(num_scopes)
                    num_scopes += 1
                    check_nesting(len(scopes) - 1)
                    self.body.add(f"{scopes[-1]}:start")
                case "end" if len(scopes) > 1:
                    scopes.pop()
                case "from" | "to":
                    self.body.repeat(token["to"] or token["from"])
                case "least" | "most":
                    self.body.repeat(token["most"] or token["least"])
                case "open" | "open_maybe":
                    self.body.open()
                case "close" | "close_maybe":
                    self.body.close()
                case "bar":
                    self.num_alternatives += 1


def check_regex_size(regex: str) -> None:
    read = _Grammar(regex, _REGEX)
    check_limit("alternatives", read.num_alternatives + 1, MAX_ALTERNATIVES)
    expanded = sum(size for _, size in read.body.written_out())
    check_limit("characters, with repetitions written out", expanded, MAX_EXPANSION)


def check_lark_size(text: str) -> None:
    is_lark = _IS_LARK.search(text) is not None
    grammar = _Grammar(text, _LARK if is_lark else _GBNF)
    check_limit("alternatives", grammar.num_alternatives, MAX_ALTERNATIVES)
    _check_references(grammar, is_lark)


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


_CHOICES = ("enum", "anyOf", "oneOf", "allOf", "type")


def check_json_nesting(value: Any) -> list[Any]:
    """Every object and list in a value of JSON; raises if they are nested too deeply."""
    found: list[Any] = []
    level, depth = _containers([value]), 1
    while level:
        check_nesting(depth)
        found += level
        level, depth = [each for outer in level for each in _containers(_items(outer))], depth + 1
    return found


def check_schema_size(schema: Any) -> None:
    values = check_json_nesting(schema)
    objects = [value for value in values if isinstance(value, dict)]
    check_limit("objects", len(objects), MAX_OBJECTS)
    num_choices = 0
    for each in objects:
        num_choices += sum(len(v) for k in _CHOICES if isinstance(v := each.get(k), list))
        patterns = each.get("patternProperties")
        if isinstance(patterns, dict):
            check_limit("patternProperties of one object", len(patterns), MAX_PATTERN_PROPERTIES)
            for pattern in patterns:
                check_regex_size(pattern)
        if isinstance(pattern := each.get("pattern"), str):
            check_regex_size(pattern)
    check_limit("values and schemas to choose from", num_choices, MAX_ALTERNATIVES)
    _check_schema_references(schema, values)


def _check_schema_references(schema: Any, values: list[Any]) -> None:
    by_id = {id(value): value for value in values}
    anchors = {
        f"#{name}": id(value)
        for value in values
        if isinstance(value, dict) and isinstance(name := value.get("$anchor"), str)
    }

    def refers(number: int) -> list[int]:
        value = by_id[number]
        inner = [id(item) for item in _containers(_items(value))]
        if isinstance(value, dict) and isinstance(name := value.get("$ref"), str):
            target = anchors.get(name) or id(_pointed_at(schema, name))
            if target in by_id:
                inner.append(target)
        return inner

    in_order(by_id, refers)


def _pointed_at(schema: Any, reference: str) -> Any:
    """What `#/$defs/name` points at; None if that is nothing."""
    found = schema
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < 9:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            return None
    return found


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list)]


def check_size(spec: GrammarSpec, param: str | None = None) -> None:
    """Raises a RequestError that names the limit. A text that is no grammar passes."""
    with _refusing(param or spec.kind):
        match spec.kind:
            case "json_schema":
                _check_schema_text(spec.text)
            case "regex":
                check_regex_size(spec.text)
            case "ebnf":
                check_lark_size(spec.text)


def _check_schema_text(text: str) -> None:
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise TooLarge(f"nested deeper than {MAX_NESTING} levels") from error
    except ValueError:
        return  # found out, and named, where schemas are read
    check_schema_size(schema)


def check_part_size(part: GrammarPart) -> None:
    """Of a custom tool's grammar, before it becomes a part of another."""
    with _refusing(part.field):
        check_limit("bytes", len(part.text.encode()), MAX_PART_BYTES)
    check_size(GrammarSpec("ebnf" if part.syntax == "lark" else "regex", part.text), part.field)


def check_nesting_of(value: Any, param: str) -> None:
    """Of a schema that was read from JSON, before any code that recurses sees it."""
    with _refusing(param):
        check_json_nesting(value)


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    try:
        yield
    except TooLarge as error:
        raise RequestError(f"{param} is too large: {error}", param=param) from error
