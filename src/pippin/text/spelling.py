"""Which bytes each token id stands for. Knows decoders of tokenizer.json; knows no requests.

Byte-level BPE spells every token as bytes; SentencePiece spells text with a visible space and
`<0xNN>` for single bytes. Knowing the bytes makes decoding incremental and exact. A decoder of
another kind has no spelling (None), and the detokenizer falls back to decoding a window.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

Spelling = Callable[[str], bytes]

SPACE = "\u2581"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, others are shifted."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(shifted)
    }


_BYTE_OF_CHAR = _byte_of_char()


def spell_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token with characters outside the alphabet is plain text
        return token.encode()


def spell_sentencepiece(token: str) -> bytes:
    return token.replace(SPACE, " ").encode()


def spell_sentencepiece_with_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return spell_sentencepiece(token)


def find_spelling(backend: tokenizers.Tokenizer) -> Spelling | None:
    """The spelling of a tokenizer, read from its decoder; None if it has no byte-wise one."""
    if backend.decoder is None:
        return None
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return spell_byte_level
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE:
        return spell_sentencepiece
    if any(_shows_spaces(step) for step in steps) and all(_is_bytewise(step) for step in steps):
        return spell_sentencepiece_with_bytes if "ByteFallback" in kinds else spell_sentencepiece
    return None


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _shows_spaces(step: dict[str, Any]) -> bool:
    return step == {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}


def _is_bytewise(step: dict[str, Any]) -> bool:
    """Strip drops the space before a text's first word; a reply continues a prompt and keeps it."""
    strips_first_space = step["type"] == "Strip" and step["content"] == " " and step["stop"] == 0
    return _shows_spaces(step) or step["type"] in {"ByteFallback", "Fuse"} or strips_first_space
