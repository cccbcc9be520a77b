"""How deep and how large JSON is, from its bytes alone, before it is decoded. Knows no field.

What is decoded takes up to twenty times the bytes of its text, and code that walks it recurses.
Where the text is no JSON the decoder stops; up to there it reads the same structure as the scan.
"""

from __future__ import annotations

import numpy as np

from pippin.api.requests import bounds
from pippin.errors import RequestError

_QUOTE, _COMMA, _POINT = ord('"'), ord(","), ord(".")
_LOWER_CASE = 0x20  # the bit that "E" lacks
_SHORTEST_FLOAT = len("1e1,")
_STEPS = np.zeros(256, np.int8)  # what a byte outside of strings adds to the depth
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1


def check_json_size(text: bytes, name: str, param: str | None = None) -> None:
    """Raise if the text is too deep, or holds too many values, for one request."""
    if _is_small(text):
        return
    # In a string a backslash escapes the next byte: without these pairs every quote is a delimiter.
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    found = np.frombuffer(plain, np.uint8)
    quotes = found == _QUOTE
    outside = found[(np.cumsum(quotes, dtype=np.uint8) & 1) == 0]  # wraps at 256, which is even
    steps = _STEPS[outside]
    steps = steps[steps != 0]
    counts: dict[str, tuple[int, int]] = {
        "objects and arrays": (int(np.count_nonzero(steps > 0)), bounds.MAX_JSON_CONTAINERS),
        "strings": (int(np.count_nonzero(quotes)) // 2, bounds.MAX_JSON_STRINGS),
        "values": (int(np.count_nonzero(outside == _COMMA)) + 1, bounds.MAX_JSON_VALUES),
        "numbers that are no integers": (_num_floats(outside), bounds.MAX_JSON_FLOATS),
    }
    for what, (count, most) in counts.items():
        if count > most:
            message = f"{name} has {count:,} {what}; at most {most:,} are allowed"
            raise RequestError(message, param=param)
    depth = int(np.cumsum(steps, dtype=np.int32).max(initial=0))
    if depth > (most := bounds.MAX_JSON_DEPTH):
        message = f"{name} is nested {depth:,} levels deep; at most {most} are allowed"
        raise RequestError(message, param=param)


def _num_floats(outside: np.ndarray) -> int:
    """By their points, or by their exponents: the "e" of `true` follows no digit."""
    digits = (outside >= ord("0")) & (outside <= ord("9"))
    exponents = digits[:-1] & ((outside[1:] | _LOWER_CASE) == ord("e"))
    return max(int(np.count_nonzero(outside == _POINT)), int(np.count_nonzero(exponents)))


def _is_small(text: bytes) -> bool:
    """Most bodies are by a count that takes strings for structure."""
    return (
        len(text) <= bounds.MAX_JSON_FLOATS * _SHORTEST_FLOAT
        and text.count(b"{") + text.count(b"[") <= bounds.MAX_JSON_DEPTH
    )
