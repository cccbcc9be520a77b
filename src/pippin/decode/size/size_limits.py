"""How large grammars may be, by name. Knows none of their languages.

docs/api/structured-output.md lists these. A grammar within all of them compiles in well under a
second.
"""

from __future__ import annotations

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
