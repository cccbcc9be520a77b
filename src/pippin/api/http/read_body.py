"""A request's body, read within limits of size and time, and of what all bodies take together."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from pippin.api.http.http_errors import BodyTooLarge, TooManyBodies, TooSlow, WrongMediaType
from pippin.api.requests.body import check_json_size
from pippin.config import LimitsConfig
from pippin.errors import RequestError, cut

MAX_PARTS = 16
MAX_FIELD_BYTES = 1_024
FILE_FIELD = "file"
MAX_OVERHEAD_BYTES = 65_536  # of a form beside its file: more than all parts may have
TIMED_BYTES = 8_000_000  # of a body, for which there is --body-timeout
PIECE_BYTES = 262_144  # that are parsed and written at a time, in a thread


@dataclass
class Form:
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: there is no file


async def read_form(
    request: Request,
    limits: LimitsConfig,
    max_file_bytes: int,
    claim: BodyClaim,
    sink: Callable[[bytes], None],
) -> Form:
    """`sink` gets the file, and may raise; it is called in threads."""
    reader = _FormReader(_boundary(request), sink)
    most = max_file_bytes + MAX_OVERHEAD_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) >= 20 or int(declared) > most):
        raise _upload_too_large(most)
    pending, received, timed = bytearray(), 0, 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limits.body_timeout) as limit:
            async for piece in request.stream():
                received += len(piece)
                claim.resize(len(pending) + len(piece))
                pending += piece
                if received > most:
                    raise _upload_too_large(most)
                if received - timed >= TIMED_BYTES:
                    timed = received
                    limit.reschedule(loop.time() + limits.body_timeout)
                if len(pending) >= PIECE_BYTES:
                    await asyncio.to_thread(reader.write, bytes(pending))
                    pending.clear()
            await asyncio.to_thread(reader.write, bytes(pending))
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TooSlow(
            f"{TIMED_BYTES:,} bytes of the request body did not arrive within "
            f"{limits.body_timeout:g} s (--body-timeout)"
        ) from error
    return reader.end()


def _upload_too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the request body has more than {most:,} bytes, the limit for one file and its form "
        "(--batch-file-bytes)"
    )


def _boundary(request: Request) -> bytes:
    given = request.headers.get("content-type", "")
    kind, options = parse_options_header(given)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        given_type = f"is {cut(given)!r}" if given else "is missing"
        raise WrongMediaType(
            f"the Content-Type {given_type}; it must be multipart/form-data with a boundary"
        )
    return options[b"boundary"]


class _FormReader:
    def __init__(self, boundary: bytes, sink: Callable[[bytes], None]) -> None:
        self._sink = sink
        self._form = Form()
        self._num_parts = 0
        self._ended = False
        self._header_name, self._header_value = bytearray(), bytearray()
        self._disposition = b""
        self._name = ""
        self._value = bytearray()
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._add_header_name,
                    "on_header_value": self._add_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._add_data,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise RequestError(f"the boundary of the form is not valid: {error}") from error

    def write(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise RequestError(f"the request body is not a multipart form: {error}") from error

    def end(self) -> Form:
        if not self._ended:
            raise RequestError("the request body ends before the form does: no last boundary")
        return self._form

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise RequestError(f"the form has more than {MAX_PARTS} parts, which is the limit")
        self._disposition = b""
        self._value.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if bytes(self._header_name).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == FILE_FIELD:
            if self._form.filename is not None:
                raise RequestError("the form has two files; it must have one", param=FILE_FIELD)
            self._form.filename = options.get(b"filename", b"upload").decode(errors="replace")
        elif self._name in self._form.fields:
            raise RequestError(f"{cut(self._name)} is given twice", param=self._name)

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE_FIELD:
            self._sink(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise RequestError(
                f"{cut(self._name)} has more than {MAX_FIELD_BYTES:,} bytes, which is the limit",
                param=self._name,
            )

    def _end_part(self) -> None:
        if self._name != FILE_FIELD:
            self._form.fields[self._name] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self._ended = True


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
