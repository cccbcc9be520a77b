"""Limits of one request that no option of the server sets. Knows no field's meaning.

Each bound is far above what agents send, and low enough that a body at all of them at once takes
less than a second to read. `docs/operations/limits.md` lists them; options are in `LimitsConfig`.
"""

from __future__ import annotations

from collections.abc import Sized

from pippin.errors import RequestError

# Of a whole body, before it is decoded, and of the arguments in a history.
MAX_JSON_DEPTH = 128
MAX_JSON_CONTAINERS = 100_000  # objects and arrays
MAX_JSON_STRINGS = 500_000  # values and names of members
MAX_JSON_VALUES = 4_000_000  # token ids may be as many
MAX_JSON_FLOATS = 20_000  # with a point or an exponent: msgspec takes up to 15 us for each
MAX_JSON_LONG_NUMBERS = 20_000
LONG_NUMBER_DIGITS = 18  # with more of them msgspec may take Python's slow way
MAX_JSON_DIGITS = 400  # of one number: time grows with their square, and no double has more

MAX_MESSAGES = 10_000  # or items of input
MAX_TOOLS = 1_024
MAX_STOP_TOKEN_IDS = 1_024
MAX_STOP_CHARS = 1_024  # of one stop string
MAX_LABEL_CHARS = 1_024  # of an id or a name that changes no reply
MAX_LABELS = 64  # members of `metadata`
MAX_LABEL_VALUE_CHARS = 16_384

# No tokenizer makes so few tokens of a real text, and it takes a second for a million bytes.
MAX_BYTES_PER_TOKEN = 16
MAX_COUNTED_BYTES = 500_000  # where tokens are only counted, of a model with a small context


def check_count(found: Sized, most: int, field: str, what: str) -> None:
    if len(found) > most:
        raise RequestError(
            f"{field} has {len(found):,} {what}; at most {most:,} are allowed", param=field
        )
