"""A request's body, read within limits of size and time. Knows no field of it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
from starlette.requests import Request

from pippin.api.http.http_errors import BodyTooLarge, TooSlow, WrongMediaType
from pippin.api.requests.json_scan import check_json_size
from pippin.config import LimitsConfig
from pippin.errors import RequestError, cut

_PAIR = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
BROWSERS_HEADERS = ("origin", "sec-fetch-site", "sec-fetch-mode", "referer", "cookie")


async def read_body(request: Request, limits: LimitsConfig) -> bytes:
    """The body of a request, which is JSON whatever a program's Content-Type says."""
    _check_media_type(request)
    _check_encoding(request)
    return await read_bytes(request, limits)


async def read_bytes(request: Request, limits: LimitsConfig) -> bytes:
    """A body of any type."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limits.max_body_bytes:
        raise _too_large(f"{int(declared):,} bytes", limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.max_body_bytes:
                    raise _too_large("larger", limits)
    except TimeoutError as error:
        raise TooSlow(
            f"the request body did not arrive within {limits.body_timeout:g} s (--body-timeout); "
            f"{len(body):,} bytes did"
        ) from error
    return bytes(body)


def decode_body(body: bytes) -> Any:
    check_json_size(body, "the request body")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {_why(body, error)}") from error


def _why(body: bytes, error: Exception) -> str:
    """JavaScript's clients send half of an emoji where they cut a text; msgspec names the byte."""
    if _HALF.search(_PAIR.sub(b"", body.replace(rb"\\", b""))):
        return r"a string has \ud800 to \udfff unpaired, as where a text was cut inside of an emoji"
    return str(error)


def _check_media_type(request: Request) -> None:
    """Pages of other sites may send other types without a preflight request.

    Programs may send any: curl and LiteLLM's Ollama client name no type, or another, for JSON.
    """
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() == "application/json" or not _is_of_browser(request):
        return
    given_type = f"is {cut(given)!r}" if given else "is missing"
    raise WrongMediaType(
        f"the Content-Type of a browser's request {given_type}; it must be application/json"
    )


def _check_encoding(request: Request) -> None:
    given = request.headers.get("content-encoding", "identity")
    if given.strip().lower() != "identity":
        raise WrongMediaType(
            f"the Content-Encoding of the request is {cut(given)!r}; send the body uncompressed"
        )


def _is_of_browser(request: Request) -> bool:
    """Current browsers send the Origin of whatever page posts, older ones at least their name."""
    headers = request.headers
    return any(name in headers for name in BROWSERS_HEADERS) or (
        headers.get("user-agent", "").startswith("Mozilla/")
    )


def _too_large(size: str, limits: LimitsConfig) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body is {size}; at most "
        f"{limits.max_body_bytes:,} bytes are allowed (--max-body-bytes)"
    )
