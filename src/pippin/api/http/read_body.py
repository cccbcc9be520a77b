"""A request's body, read within limits of size and time, and of what all bodies take together."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from types import TracebackType
from typing import Any

import msgspec
from starlette.requests import Request

from pippin.api.http.http_errors import BodyTooLarge, TooManyBodies, TooSlow, WrongMediaType
from pippin.api.requests.json_scan import check_json_size
from pippin.config import LimitsConfig
from pippin.errors import RequestError, cut

_PAIR = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
BROWSERS_HEADERS = ("origin", "sec-fetch-site", "sec-fetch-mode", "referer", "cookie")


MIN_BUDGET_BYTES = 256_000_000
BODIES_OF_BUDGET = 8  # of the largest size


class BodyBudget:
    """What the bodies of all requests may take, from their first byte until they were read.

    A client may have as much as the others leave free: alone it has half, and each of two a third,
    so that some is always free for another one.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._max_bytes = max(MIN_BUDGET_BYTES, BODIES_OF_BUDGET * limits.max_body_bytes)
        self._by_client: Counter[bytes | str] = Counter()
        self._claimed = 0

    def claim(self, client: bytes | str) -> BodyClaim:
        return BodyClaim(self, client)

    def add(self, client: bytes | str, nbytes: int) -> None:
        """Raise TooManyBodies where that is more than the client may have. Negative: it is free."""
        own, claimed = self._by_client[client] + nbytes, self._claimed + nbytes
        if nbytes > 0 and own > self._max_bytes - claimed:
            raise TooManyBodies(
                f"bodies of requests that are being read take {self._claimed:,} of "
                f"{self._max_bytes:,} bytes, {own - nbytes:,} of them for this client, which may "
                "have no more than is free; try again later"
            )
        self._claimed = claimed
        self._by_client[client] = own
        if not own:
            del self._by_client[client]


class BodyClaim:
    """Of one request. Left, it is free."""

    def __init__(self, budget: BodyBudget, client: bytes | str) -> None:
        self._budget = budget
        self._client = client
        self._nbytes = 0

    def resize(self, nbytes: int) -> None:
        self._budget.add(self._client, nbytes - self._nbytes)
        self._nbytes = nbytes

    def __enter__(self) -> BodyClaim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.resize(0)


async def read_body(request: Request, limits: LimitsConfig, claim: BodyClaim) -> bytearray:
    """The body of a request, which is JSON whatever a program's Content-Type says."""
    _check_media_type(request)
    _check_encoding(request)
    return await read_bytes(request, limits, claim)


async def read_bytes(request: Request, limits: LimitsConfig, claim: BodyClaim) -> bytearray:
    """A body of any type."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limits.max_body_bytes:
        raise _too_large(f"{int(declared):,} bytes", limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for piece in request.stream():
                claim.resize(len(body) + len(piece))
                body += piece
                if len(body) > limits.max_body_bytes:
                    raise _too_large("larger", limits)
    except TimeoutError as error:
        raise TooSlow(
            f"the request body did not arrive within {limits.body_timeout:g} s (--body-timeout); "
            f"{len(body):,} bytes did"
        ) from error
    return body


def decode_body(body: bytes | bytearray) -> Any:
    check_json_size(body, "the request body")
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {_why(body, error)}") from error


def _why(body: bytes | bytearray, error: Exception) -> str:
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
