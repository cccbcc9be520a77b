"""Format and size of a picture, from the first bytes of its base64. Decodes no picture."""

from __future__ import annotations

import base64
import binascii
import struct

# The size follows what cameras write before it, which may be a preview of the picture.
MAX_CHARS = 87_384  # 64 KiB and a little
MAX_SEGMENTS = 32  # of a JPEG
_JPEG_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of segments with the size


def describe_image(data: str) -> str:
    """Such as "640x480 PNG"; empty, if it is none that is known."""
    try:
        head = base64.b64decode(data[:MAX_CHARS].partition("=")[0].encode() + b"===")
        return _describe(head)
    except (binascii.Error, UnicodeEncodeError, struct.error):
        return ""


def _describe(head: bytes) -> str:
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack_from(">II", head, 16)
        return _shown(width, height, "PNG")
    if head[:6] in (b"GIF87a", b"GIF89a"):
        width, height = struct.unpack_from("<HH", head, 6)
        return _shown(width, height, "GIF")
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return _webp(head)
    if head.startswith(b"\xff\xd8"):
        return _jpeg(head)
    return ""


def _webp(head: bytes) -> str:
    kind = head[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return _shown(width & 0x3FFF, height & 0x3FFF, "WebP")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return _shown((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, "WebP")
    if kind == b"VP8X":
        low, high, height_low, height_high = struct.unpack_from("<HBHB", head, 24)
        return _shown((high << 16 | low) + 1, (height_high << 16 | height_low) + 1, "WebP")
    return "WebP"


def _jpeg(head: bytes) -> str:
    at = 2
    for _ in range(MAX_SEGMENTS):
        if at + 9 > len(head):
            break
        marker, length = head[at + 1], int.from_bytes(head[at + 2 : at + 4], "big")
        if head[at] != 0xFF:
            break
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", head, at + 5)
            return _shown(width, height, "JPEG")
        at += 2 + length
    return "JPEG"


def _shown(width: int, height: int, format: str) -> str:
    return f"{width}x{height} {format}"
