"""A request's body, read within limits of size and time, and of what all bodies take together."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from pippin.api.requests.body import check_json_size
from pippin.config import LimitsConfig
from pippin.errors import PippinError, RequestError, cut

MAX_FIELDS = 15
MAX_FIELD_BYTES = 1_024
FILE_FIELD = "file"
MAX_OVERHEAD_BYTES = 65_536  # of a form beside its file: more than all parts may have
TIMED_BYTES = 8_000_000  # of a body, for which there is --body-timeout


class Sink(Protocol):
    """Where a file is written, in threads. It may raise."""

    def write(self, data: bytes, /) -> object: ...

    def seek(self, offset: int, /) -> object: ...


class Form(NamedTuple):
    fields: dict[str, str]
    filename: str | None  # None: there is no file


async def read_form(
    request: Request, limits: LimitsConfig, max_file_bytes: int, claim: Claim, sink: Sink
) -> Form:
    most = max_file_bytes + MAX_OVERHEAD_BYTES
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) >= 20 or int(declared) > most):
        raise _upload_too_large(most)
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "multipart/form-data" or "boundary" not in given:
        given_type = f"is {cut(given)!r}" if given else "is missing"
        raise PippinError(
            f"the Content-Type {given_type}; it must be multipart/form-data with a boundary",
            code="unsupported_media_type",
        )
    loop = asyncio.get_running_loop()

    async def pieces() -> AsyncGenerator[bytes, None]:
        received = timed = 0
        async for piece in request.stream():
            received += len(piece)
            claim(len(piece))
            if received > most:
                raise _upload_too_large(most)
            if received - timed >= TIMED_BYTES:
                timed = received
                limit.reschedule(loop.time() + limits.body_timeout)
            yield piece

    parser = _FormParser(request.headers, pieces(), sink)
    try:
        async with asyncio.timeout(limits.body_timeout) as limit:
            found = await parser.parse()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise PippinError(
            f"{TIMED_BYTES:,} bytes of the request body did not arrive within "
            f"{limits.body_timeout:g} s (--body-timeout)",
            code="request_too_slow",
        ) from error
    except MultiPartException as error:
        raise RequestError(f"the request body is not an expected form: {error.message}") from error
    if not parser.has_ended:
        raise RequestError("the request body ends before the form does: no last boundary")
    form: dict[str, str] = {}
    filename = None
    for name, value in found.multi_items():
        if name in form:
            raise RequestError(f"{cut(name)} is given twice", param=name)
        if name == FILE_FIELD and isinstance(value, UploadFile):
            filename = value.filename or "upload"
        else:
            form[name] = value if isinstance(value, str) else ""
    return Form(form, filename)


class _FormParser(MultiPartParser):
    """Starlette's, which writes the file where it stays, instead of a temporary one."""

    def __init__(self, headers: Headers, pieces: AsyncGenerator[bytes, None], sink: Sink) -> None:
        bounds = {"max_files": 1, "max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
        super().__init__(headers, pieces, **bounds)
        self._sink: Any = sink
        self.has_ended = False

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if (file := self._current_part.file) is not None:
            file.file.close()
            file.file = self._sink

    def on_end(self) -> None:
        self.has_ended = True


def _upload_too_large(most: int) -> PippinError:
    return PippinError(
        f"the request body has more than {most:,} bytes, the limit for one file and its form "
        "(--batch-file-bytes)",
        code="request_too_large",
    )


_PAIR = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
BROWSERS_HEADERS = ("origin", "sec-fetch-site", "sec-fetch-mode", "referer", "cookie")


MIN_BUDGET_BYTES = 256_000_000
BODIES_OF_BUDGET = 8  # of the largest size


Claim = Callable[[int], None]  # of so many bytes


class BodyBudget:
    """What the bodies of all requests may take, from their first byte until they were read.

    A client may have as much as the others leave free: alone it has half, and each of two a third,
    so that some is always free for another one.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._max_bytes = max(MIN_BUDGET_BYTES, BODIES_OF_BUDGET * limits.max_body_bytes)
        self._by_client: Counter[bytes | str] = Counter()
        self._claimed = 0

    @contextmanager
    def claim(self, client: bytes | str) -> Iterator[Claim]:
        """What one request holds is set by calling it. Left, it is free."""
        held = 0

        def resize(nbytes: int) -> None:
            nonlocal held
            self._add(client, nbytes - held)
            held = nbytes

        try:
            yield resize
        finally:
            resize(0)

    def _add(self, client: bytes | str, nbytes: int) -> None:
        """Raise an error where that is more than the client may have. Negative: it is free."""
        own, claimed = self._by_client[client] + nbytes, self._claimed + nbytes
        if nbytes > 0 and own > self._max_bytes - claimed:
            raise PippinError(
                f"bodies of requests that are being read take {self._claimed:,} of "
                f"{self._max_bytes:,} bytes, {own - nbytes:,} of them for this client, which may "
                "have no more than is free; try again later",
                code="too_many_request_bodies",
            )
        self._claimed = claimed
        self._by_client[client] = own
        if not own:
            del self._by_client[client]


async def read_body(request: Request, limits: LimitsConfig, claim: Claim) -> bytearray:
    """The body of a request, which is JSON whatever a program's Content-Type says."""
    _check_media_type(request)
    _check_encoding(request)
    return await read_bytes(request, limits, claim)


async def read_bytes(request: Request, limits: LimitsConfig, claim: Claim) -> bytearray:
    """A body of any type."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > limits.max_body_bytes:
        raise _too_large(f"{int(declared):,} bytes", limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for piece in request.stream():
                claim(len(body) + len(piece))
                body += piece
                if len(body) > limits.max_body_bytes:
                    raise _too_large("larger", limits)
    except TimeoutError as error:
        raise PippinError(
            f"the request body did not arrive within {limits.body_timeout:g} s (--body-timeout); "
            f"{len(body):,} bytes did",
            code="request_too_slow",
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
    raise PippinError(
        f"the Content-Type of a browser's request {given_type}; it must be application/json",
        code="unsupported_media_type",
    )


def _check_encoding(request: Request) -> None:
    given = request.headers.get("content-encoding", "identity")
    if given.strip().lower() != "identity":
        raise PippinError(
            f"the Content-Encoding of the request is {cut(given)!r}; send the body uncompressed",
            code="unsupported_media_type",
        )


def _is_of_browser(request: Request) -> bool:
    """Current browsers send the Origin of whatever page posts, older ones at least their name."""
    headers = request.headers
    return any(name in headers for name in BROWSERS_HEADERS) or (
        headers.get("user-agent", "").startswith("Mozilla/")
    )


def _too_large(size: str, limits: LimitsConfig) -> PippinError:
    return PippinError(
        f"the request body is {size}; at most "
        f"{limits.max_body_bytes:,} bytes are allowed (--max-body-bytes)",
        code="request_too_large",
    )


T = TypeVar("T")
LARGE_BYTES = 256_000
SMALL_BYTES = 8_000  # decoded faster than a thread is reached
NUM_SMALL, NUM_LARGE = 4, 1  # threads, by the size of the bodies that they read
NUM_THREADS = NUM_SMALL + NUM_LARGE


class Workers:
    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(NUM_SMALL, thread_name_prefix="prepare")
        self._large = ThreadPoolExecutor(NUM_LARGE, thread_name_prefix="prepare-large")
        self._small_decoded = asyncio.Semaphore(NUM_SMALL)
        self._large_decoded = asyncio.Semaphore(NUM_LARGE)

    async def run(self, work: Callable[[bytearray], T], body: bytearray) -> T:
        pool = self._large if len(body) > LARGE_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work, body)

    def decoded(self, body: bytearray) -> AbstractAsyncContextManager[None]:
        """While what a body is decoded to is in memory."""
        return self._large_decoded if len(body) > LARGE_BYTES else self._small_decoded


# mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = {
    _ARENA_MAX: 1 + NUM_THREADS,
    _MMAP_THRESHOLD: 256 << 10,  # given back when it is freed; a fixed one does not grow by itself
    _TRIM_THRESHOLD: 8 << 20,  # of what is free at the end of the heap
}


def return_freed_memory() -> bool:
    """Before there are threads. False where there is no glibc."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    taken = [libc.mallopt(option, value) for option, value in _SETTINGS.items()]
    return all(taken)
