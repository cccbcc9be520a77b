"""Whether a grammar of any language is small enough to be compiled. Knows no HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pippin.decode.size.lark_size import check_lark_size
from pippin.decode.size.regex_size import check_regex_size
from pippin.decode.size.schema_size import check_json_nesting, check_schema_size
from pippin.decode.size.size_limits import MAX_NESTING, MAX_PART_BYTES, TooLarge, check_limit
from pippin.errors import RequestError
from pippin.types import GrammarPart, GrammarSpec


def check_size(spec: GrammarSpec, param: str | None = None) -> None:
    """Raises a RequestError that names the limit. A text that is no grammar passes."""
    with _refusing(param or spec.kind):
        match spec.kind:
            case "json_schema":
                check_schema_size(_read(spec.text))
            case "regex":
                check_regex_size(spec.text)
            case "ebnf":
                check_lark_size(spec.text)


def check_part_size(part: GrammarPart) -> None:
    """Of a custom tool's grammar, before it becomes a part of another."""
    with _refusing(part.field):
        check_limit("bytes", len(part.text.encode()), MAX_PART_BYTES)
    check_size(GrammarSpec("ebnf" if part.syntax == "lark" else "regex", part.text), part.field)


def check_nesting_of(value: Any, param: str) -> None:
    """Of a schema that was read from JSON, before any code that recurses sees it."""
    with _refusing(param):
        check_json_nesting(value)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise TooLarge(f"nested deeper than {MAX_NESTING} levels") from error
    except ValueError:
        return None  # found out, and named, where schemas are read


@contextmanager
def _refusing(param: str) -> Iterator[None]:
    try:
        yield
    except TooLarge as error:
        raise RequestError(f"{param} is too large: {error}", param=param) from error
