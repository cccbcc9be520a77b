"""Reads members of a JSON object, with errors that name where they are.

As in OpenAI's API, a field that is null counts as left out.
"""

from __future__ import annotations

import difflib
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, TypeVar

import msgspec
import numpy as np

from pippin.errors import MAX_SHOWN_CHARS, RequestError, UnsupportedField, cut
from pippin.messages import Submit

# Of a whole body, before it is decoded, and of the arguments in a history.
MAX_JSON_DEPTH = 128
MAX_JSON_CONTAINERS = 100_000  # objects and arrays
MAX_JSON_STRINGS = 500_000  # values and names of members
MAX_JSON_VALUES = 1_500_000  # token ids may be as many; decoded in one call, of 70 ms
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


NUM_NAMES = 32
HEADER_CHARS = 1_000
MORE = "..."
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]-]")  # a client's text must not end or split a header


class Leniency:
    """How lenient one request is read, and what was ignored: each name once, in order."""

    def __init__(self, *, strict_fields: bool = False, refuses_images: bool = False) -> None:
        self._strict = strict_fields
        self._refuses_images = refuses_images
        self.omitted: list[str] = []  # pictures and files, for the reply's own body
        self._names: dict[str, None] = {}
        self._num_chars = 0
        self._is_full = False

    def ignore(self, name: str, why: str, value: str = "") -> None:
        if self._strict:
            sent = f" ({cut(value)})" if value else ""
            raise UnsupportedField(
                f"{name}{sent} is not supported: {why} (--strict-fields)", param=name
            )
        self._add(name, value)

    def omit(self, name: str, kind: str) -> None:
        """A picture or a file, which a placeholder replaces."""
        if self._refuses_images:
            raise UnsupportedField(
                f"{name} is of the type {kind}; this model reads text only (--images refuse)",
                param=name,
            )
        if (entry := self._add(name, kind)) is not None:
            self.omitted.append(entry)

    def header(self) -> str:
        return ", ".join([*self._names, *[MORE] * self._is_full])

    def _add(self, name: str, value: str) -> str | None:
        """The entry, if it is a new one that fits."""
        if self._is_full:
            return None
        entry = _plain(name) + (f" ({_plain(value)})" if value else "")
        if entry in self._names:
            return None
        num_chars = self._num_chars + len(entry) + len(", ")
        if len(self._names) == NUM_NAMES or num_chars > HEADER_CHARS - len(MORE):
            self._is_full = True
            return None
        self._names[entry] = None
        self._num_chars = num_chars
        return entry


def _plain(text: str) -> str:
    return _NOT_PLAIN.sub("?", cut(text))


_QUOTE, _COMMA, _POINT = ord('"'), ord(","), ord(".")
_LOWER_CASE = 0x20  # the bit that "E" lacks
_SHORTEST_FLOAT = len("1e1,")
_BLOCK_BYTES = 1 << 20  # that are scanned at a time: what a block takes is several times that
_STEPS = np.zeros(256, np.int8)  # what a byte outside of strings adds to the depth
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1
# Of a number that is too long, two in a row of the bytes at multiples of this are digits.
_SAMPLE = MAX_JSON_DIGITS // 2
_COUNT = "has {{:,}} {}; at most {{:,}} are allowed"
_LONG_NUMBERS = f"numbers of more than {LONG_NUMBER_DIGITS} digits"
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
            (_COUNT.format("objects and arrays"), self._containers, MAX_JSON_CONTAINERS),
            (_COUNT.format("strings"), self._quotes // 2, MAX_JSON_STRINGS),
            (_COUNT.format("values"), self._commas + 1, MAX_JSON_VALUES),
            (_COUNT.format("numbers that are no integers"), self._floats, MAX_JSON_FLOATS),
            (_COUNT.format(_LONG_NUMBERS), self._long_numbers, MAX_JSON_LONG_NUMBERS),
            (
                "has a number of {:,} digits; at most {:,} are allowed",
                self._most_digits,
                MAX_JSON_DIGITS,
            ),
            (
                "is nested {:,} levels deep; at most {:,} are allowed",
                self._max_depth,
                MAX_JSON_DEPTH,
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
        self._long_numbers += int(np.count_nonzero(lengths > LONG_NUMBER_DIGITS))


def _is_small(text: bytes | bytearray) -> bool:
    """Most bodies are by a count that takes strings for structure."""
    return (
        len(text) <= MAX_JSON_FLOATS * _SHORTEST_FLOAT
        and text.count(b"{") + text.count(b"[") <= MAX_JSON_DEPTH
        and not _TWO_DIGITS.search(text[::_SAMPLE])
    )


MAX_ID_DIGITS = 18  # far more than any vocabulary needs; Python refuses to read thousands


def are_token_ids(value: Any, vocab_size: int) -> bool:
    if not isinstance(value, list | tuple):
        return False
    # No line of Python for each.
    return set(map(type, value)) <= {int} and (
        not value or (min(value) >= 0 and max(value) < vocab_size)
    )


def token_ids_in_words(vocab_size: int) -> str:
    return f"token ids from 0 to {vocab_size - 1:,}"


T = TypeVar("T")
_INDEX = re.compile(r"\[\d+\]")
_IS_NEAR = 0.75  # of two names, by difflib's ratio


class Body:
    """One JSON object, where it is in the request, and how lenient it is read."""

    def __init__(
        self,
        fields: Any,
        path: str = "",
        leniency: Leniency | None = None,
        sent: Mapping[str, str] | None = None,
    ) -> None:
        """`sent`: what the client calls fields that have our names."""
        self.path = path
        self._sent = sent or {}
        self.leniency = leniency or Leniency()
        if not isinstance(fields, dict):
            raise RequestError(
                f"{path or 'the request body'} is {shown(fields)}; it must be a JSON object",
                param=path or None,
            )
        self._fields: dict[str, Any] = fields

    def __len__(self) -> int:
        return len(self._fields)

    def name(self, field: str) -> str:
        field = cut(self._sent.get(field, field))
        return f"{self.path}.{field}" if self.path else field

    def fields(self) -> Iterable[str]:
        return self._fields.keys()

    def get(self, field: str, default: Any = None) -> Any:
        value = self._fields.get(field)
        return default if value is None else value

    def has(self, field: str) -> bool:
        return self._fields.get(field) is not None

    def error(self, field: str, what: str) -> RequestError:
        name = self.name(field)
        return RequestError(f"{name} {what}", param=name)

    def wrong(self, field: str, expected: str) -> RequestError:
        return self.error(field, f"is {shown(self.get(field))}; it must be {expected}")

    def unsupported(self, field: str, what: str) -> UnsupportedField:
        name = self.name(field)
        return UnsupportedField(f"{name} is {shown(self.get(field))}; {what}", param=name)

    def require(self, field: str) -> Any:
        if not self.has(field):
            raise self.error(field, "is required")
        return self._fields[field]

    def check_known(self, known: Iterable[str]) -> None:
        known = set(known)
        for field in self._fields:
            if field not in known and self.has(field):
                near = difflib.get_close_matches(field[:MAX_SHOWN_CHARS], known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise self.error(field, f"is not a field of this request{hint}")

    def ignore(self, field: str, why: str, value: str = "") -> None:
        self.leniency.ignore(self.name(field), why, value)

    def ignore_unknown(self, known: Iterable[str]) -> None:
        """For parts of which other servers and clients have further fields."""
        unknown = [field for field in self._fields if field not in known and self.has(field)]
        if unknown:
            place = _INDEX.sub("[]", self.path)
            for field in unknown:
                name = f"{place}.{cut(field)}" if place else cut(field)
                self.leniency.ignore(name, "it is not a field of this object")

    def is_foreign(self, field: str, known: Sequence[str]) -> bool:
        """Whether it names a type of another server's. A misspelt one is refused."""
        value = self.required_string(field)
        if value in known:
            return False
        if near := difflib.get_close_matches(value[:MAX_SHOWN_CHARS], known, 1, _IS_NEAR):
            raise self.unsupported(field, f"did you mean {near[0]}?")
        return True

    def boolean(self, field: str, default: bool) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def string(self, field: str, default: T) -> str | T:
        value = self.get(field)
        if value is not None and not isinstance(value, str):
            raise self.wrong(field, "a string")
        return default if value is None else value

    def required_string(self, field: str) -> str:
        self.require(field)
        return self.string(field, "")

    def one_of(self, field: str, choices: Sequence[str]) -> str | None:
        value = self.get(field)
        if value is not None and value not in choices:
            raise self.wrong(field, f"one of {', '.join(choices)}")
        return None if value is None else str(value)

    def object(self, field: str) -> Body | None:
        return self._inner(self.get(field), self.name(field)) if self.has(field) else None

    def required_object(self, field: str) -> Body:
        return self._inner(self.require(field), self.name(field))

    def objects(self, field: str, expected: str = "a list") -> list[Body]:
        value = self.get(field)
        if not isinstance(value, list):
            raise self.wrong(field, expected)
        return [self._inner(item, f"{self.name(field)}[{i}]") for i, item in enumerate(value)]

    def renamed(self, fields: dict[str, Any], sent: Mapping[str, str] | None = None) -> Body:
        """The same request, by other names of its fields."""
        return Body(fields, self.path, self.leniency, sent)

    def _inner(self, fields: Any, path: str) -> Body:
        return Body(fields, path, self.leniency)


def shown(value: Any) -> str:
    """A value as it was sent, cut short."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_CHARS + 1]
    return cut(msgspec.json.encode(value).decode())


MAX_SALT_CHARS = 1_024


def check_salt(given: Any, param: str = "cache_salt") -> bytes:
    """The digest of a `cache_salt`; empty: there is none. No error echoes it: it is a secret."""
    if given is None:
        return b""
    if not isinstance(given, str):
        raise RequestError(f"{param} is {shown(given)}; it must be a string", param=param)
    if not 0 < len(given) <= MAX_SALT_CHARS:
        raise RequestError(
            f"{param} has {len(given):,} characters; it must have 1 to {MAX_SALT_CHARS:,}",
            param=param,
        )
    text = given.encode("utf-8", errors="surrogatepass")
    return hashlib.sha256(b"pippin cache_salt\0" + text).digest()


def salt_of_owner(owner: bytes) -> bytes:
    """Of all prefixes of the owner of an API key, by the key's digest."""
    return hmac.digest(owner, b"pippin salt of an API key", "sha256")


def under_owner(submit: Submit, owner_salt: bytes) -> Submit:
    """The request, with prefixes that requests of other owners do not share."""
    if not owner_salt:
        return submit
    salt = hmac.digest(owner_salt, submit.salt, "sha256") if submit.salt else owner_salt
    return msgspec.structs.replace(submit, salt=salt)


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
