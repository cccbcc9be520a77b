"""How deep and how large JSON is, from its bytes alone, before it is decoded.

What is decoded takes up to twenty times the bytes of its text, and code that walks it recurses.
Where the text is no JSON the decoder stops; up to there it reads the same structure as the scan.
"""

from __future__ import annotations

import re

import numpy as np

from pippin.api.requests import bounds
from pippin.errors import RequestError

_QUOTE, _COMMA, _POINT = ord('"'), ord(","), ord(".")
_LOWER_CASE = 0x20  # the bit that "E" lacks
_SHORTEST_FLOAT = len("1e1,")
_BLOCK_BYTES = 1 << 20  # that are scanned at a time: what a block takes is several times that
_STEPS = np.zeros(256, np.int8)  # what a byte outside of strings adds to the depth
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1
# Of a number that is too long, two in a row of the bytes at multiples of this are digits.
_SAMPLE = bounds.MAX_JSON_DIGITS // 2
_COUNT = "has {{:,}} {}; at most {{:,}} are allowed"
_LONG_NUMBERS = f"numbers of more than {bounds.LONG_NUMBER_DIGITS} digits"
_TWO_DIGITS = re.compile(rb"[0-9]{2}")


def check_json_size(text: bytes | bytearray, name: str, param: str | None = None) -> None:
    """Raise if the text is too deep, or holds too many values, for one request."""
    if _is_small(text):
        return
    scan = _Scan()
    at = 0
    while at < len(text):
        block = bytes(text[at : at + _BLOCK_BYTES])
        if (len(block) - len(block.rstrip(b"\\"))) % 2:  # the last one escapes the next byte
            block = bytes(text[at : at + len(block) + 1])
        at += len(block)
        scan.add(block)
        for what, found, most in scan.found():
            if found > most:
                raise RequestError(f"{name} {what.format(found, most)}", param=param)


class _Scan:
    def __init__(self) -> None:
        self._in_string = False
        self._depth = 0
        self._digits = 0  # at the end of the last block
        self._quotes = self._containers = self._commas = self._floats = self._long_numbers = 0
        self._most_digits = self._max_depth = 0

    def found(self) -> list[tuple[str, int, int]]:
        """What to say of it, how many there are so far, and how many may be."""
        return [
            (_COUNT.format("objects and arrays"), self._containers, bounds.MAX_JSON_CONTAINERS),
            (_COUNT.format("strings"), self._quotes // 2, bounds.MAX_JSON_STRINGS),
            (_COUNT.format("values"), self._commas + 1, bounds.MAX_JSON_VALUES),
            (_COUNT.format("numbers that are no integers"), self._floats, bounds.MAX_JSON_FLOATS),
            (_COUNT.format(_LONG_NUMBERS), self._long_numbers, bounds.MAX_JSON_LONG_NUMBERS),
            (
                "has a number of {:,} digits; at most {:,} are allowed",
                self._most_digits,
                bounds.MAX_JSON_DIGITS,
            ),
            (
                "is nested {:,} levels deep; at most {:,} are allowed",
                self._max_depth,
                bounds.MAX_JSON_DEPTH,
            ),
        ]

    def add(self, block: bytes) -> None:
        # In a string a backslash escapes the next byte: without these pairs every quote is a
        # delimiter.
        plain = block.replace(rb"\\", b"").replace(rb"\"", b"")
        found = np.frombuffer(plain, np.uint8)
        quotes = found == _QUOTE
        # The sum wraps at 256, which is even.
        inside = (np.cumsum(quotes, dtype=np.uint8) & 1) != self._in_string
        outside = found[~inside]
        num_quotes = int(np.count_nonzero(quotes))
        self._quotes += num_quotes
        self._in_string ^= bool(num_quotes % 2)
        self._commas += int(np.count_nonzero(outside == _COMMA))
        self._add_depth(outside)
        self._add_numbers(outside)

    def _add_depth(self, outside: np.ndarray) -> None:
        steps = _STEPS[outside]
        steps = steps[steps != 0]
        self._containers += int(np.count_nonzero(steps > 0))
        depths = np.cumsum(steps, dtype=np.int32)
        if len(depths):
            self._max_depth = max(self._max_depth, self._depth + int(depths.max()))
            self._depth += int(depths[-1])

    def _add_numbers(self, outside: np.ndarray) -> None:
        """By their points, or by their exponents: the "e" of `true` follows no digit."""
        digits = (outside >= ord("0")) & (outside <= ord("9"))
        exponents = digits[:-1] & ((outside[1:] | _LOWER_CASE) == ord("e"))
        points = int(np.count_nonzero(outside == _POINT))
        self._floats += max(points, int(np.count_nonzero(exponents)))
        ends = np.flatnonzero(~digits)
        if not len(ends):
            self._digits += len(outside)
            self._most_digits = max(self._most_digits, self._digits)
            return
        lengths = np.diff(ends, prepend=-1 - self._digits) - 1
        self._digits = len(outside) - 1 - int(ends[-1])
        self._most_digits = max(self._most_digits, int(lengths.max()), self._digits)
        self._long_numbers += int(np.count_nonzero(lengths > bounds.LONG_NUMBER_DIGITS))


def _is_small(text: bytes | bytearray) -> bool:
    """Most bodies are by a count that takes strings for structure."""
    return (
        len(text) <= bounds.MAX_JSON_FLOATS * _SHORTEST_FLOAT
        and text.count(b"{") + text.count(b"[") <= bounds.MAX_JSON_DEPTH
        and not _TWO_DIGITS.search(text[::_SAMPLE])
    )
