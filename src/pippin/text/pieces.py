"""What a reply consists of, as it arrives: content, reasoning, tool calls.

A call is a `CallBegin`, any number of `CallArguments` and one `CallEnd`. Neighbours of one kind may
be cut anywhere; joined, they do not depend on how the reply's text was cut. Every token makes one:
they are structs, which cost a fifth of frozen dataclasses.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

# Objects and arrays inside each other. Far below what a history may hold, so that calls can be sent
# back, and below any interpreter's limit of recursion.
MAX_ARGUMENTS_DEPTH = 64


class Content(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallBegin(msgspec.Struct, frozen=True, gc=False):
    index: int  # 0 is the reply's first call
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next part of a JSON object's text. All parts of a call that ended well are valid JSON."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a call. `unparsed`: all of its text, if it is malformed or was cut short."""

    index: int
    unparsed: str | None = None


TextPiece = Content | Reasoning | CallBegin | CallArguments | CallEnd


@dataclass
class FoldedCall:
    id: str
    name: str
    arguments: str = ""  # JSON, unless the reply was cut in the middle of it


@dataclass
class FoldedText:
    """A whole reply. A call that could not be parsed is content, as it was written."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, FoldedCall] = field(default_factory=dict)  # by index

    @classmethod
    def of(cls, pieces: Iterable[TextPiece]) -> FoldedText:
        folded = cls()
        for piece in pieces:
            folded.add(piece)
        return folded

    def add(self, piece: TextPiece) -> None:
        match piece:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegin(index, id, name):
                self.calls[index] = FoldedCall(id, name)
            case CallArguments(index, text):
                self.calls[index].arguments += text
            case CallEnd(index, unparsed) if unparsed is not None:
                del self.calls[index]
                self.content += unparsed


def joined(pieces: Iterable[TextPiece]) -> list[TextPiece]:
    """The same pieces, with neighbours of one kind made one."""
    if isinstance(pieces, list) and len(pieces) < 2:
        return pieces
    out: list[TextPiece] = []
    for _, group in itertools.groupby(pieces, _kind):
        first, *rest = group
        if rest:
            assert isinstance(first, Content | Reasoning | CallArguments)
            text = first.text + "".join(piece.text for piece in rest)  # type: ignore[union-attr]
            first = msgspec.structs.replace(first, text=text)
        out.append(first)
    return out


def _kind(piece: TextPiece) -> object:
    """The same for pieces that can be joined."""
    if isinstance(piece, CallArguments):
        return piece.index
    return type(piece) if isinstance(piece, Content | Reasoning) else piece


def content_of(pieces: Sequence[TextPiece]) -> str:
    if len(pieces) == 1 and isinstance(pieces[0], Content):
        return pieces[0].text
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


_CLOSES = {"{": "}", "[": "]"}


def members_of(text: str) -> dict[str, Any]:
    """Of a JSON object whose text was cut short: all that can be read, a string that was cut
    included; none of a text that is no object, or nested deeper than a call's arguments may be."""
    ends, open_at_comma, at_comma, in_string, escaped = "", "", 0, False, False
    for at, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in _CLOSES:
            ends = _CLOSES[character] + ends
            if len(ends) > MAX_ARGUMENTS_DEPTH:
                return {}
        elif character in "}]":
            ends = ends[1:]
        elif character == ",":
            at_comma, open_at_comma = at, ends
    whole = text[:-1] if escaped else text
    found = _object_in(whole + '"' * in_string + ends)
    if found is None:
        found = _object_in(text[:at_comma] + open_at_comma)
    return found or {}


def _object_in(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
