"""A multipart form with one file, read within limits as it arrives. Knows no field by name.

The file goes to a sink, piece by piece; other fields are short and stay in memory. Headers of parts
are limited by the parser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from pippin.api.http.http_errors import BodyTooLarge, TooSlow, WrongMediaType
from pippin.api.http.read_body import BodyClaim
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
        raise _too_large(most)
    pending, received, timed = bytearray(), 0, 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limits.body_timeout) as limit:
            async for piece in request.stream():
                received += len(piece)
                claim.resize(len(pending) + len(piece))
                pending += piece
                if received > most:
                    raise _too_large(most)
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


def _too_large(most: int) -> BodyTooLarge:
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
