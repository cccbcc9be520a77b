"""The lines of a batch: read within bounds, checked, answered, and their results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Container, Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.types import ASGIApp, Message, Scope

from pippin.api.batches.batch import Batch, BatchUsage, LineError
from pippin.api.batches.store import FileStore
from pippin.api.http.request_log import RequestLog, record_of
from pippin.api.requests.body import check_json_size
from pippin.errors import RETRY_AFTER_S, PippinError, RequestError, cut

MAX_LINES = 50_000  # as OpenAI's
MAX_CUSTOM_ID_CHARS = 256
MAX_ERRORS = 100  # that are reported of one file
_DISCARDED_BYTES = 1 << 20  # read at a time of what is too long


class InputLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Peek(msgspec.Struct, frozen=True):
    model: Any = None
    stream: Any = None


def check_lines(
    path: Path, endpoint: str, most: int, check_model: Callable[[str], object]
) -> tuple[int, list[LineError]]:
    """How many requests a file has, and what is wrong with its lines: `most` bytes each."""
    known: set[str] = set()
    errors: list[LineError] = []
    for number, text in _numbered(path, most):
        if number > MAX_LINES:
            message = f"the file has more than {MAX_LINES:,} lines, the limit for one batch"
            return 0, [LineError("too_many_tasks", message, number)]
        try:
            if text is None:
                message = f"the line is longer than {most:,} bytes (--max-body-bytes)"
                raise RequestError(message, code="line_too_long")
            if not text.strip():
                continue
            line = _checked(text, endpoint, check_model)
            if line.custom_id in known:
                raise RequestError(
                    f"the custom_id {cut(line.custom_id)!r} was used on an earlier line; each "
                    "line needs its own",
                    code="duplicate_custom_id",
                    param="custom_id",
                )
            known.add(line.custom_id)
        except PippinError as error:
            errors.append(LineError(error.code, error.message, number, error.param))
            if len(errors) == MAX_ERRORS:
                break
    if not known and not errors:
        errors.append(LineError("empty_file", "the input file has no requests"))
    return len(known), errors


class WaitingLines:
    """Lines that have no result yet. Threads may share it."""

    def __init__(self, path: Path, max_line_bytes: int, done: Container[str]) -> None:
        self._lines = _numbered(path, max_line_bytes)
        self._done = done
        self._lock = threading.Lock()

    def next(self) -> InputLine | None:
        with self._lock:
            for _, text in self._lines:
                assert text is not None, "checked"
                if not text.strip():
                    continue
                line = msgspec.json.decode(text, type=InputLine)
                if line.custom_id not in self._done:
                    return line
            return None

    def close(self) -> None:
        with self._lock:
            self._lines.close()


def _numbered(path: Path, most: int) -> Generator[tuple[int, bytes | None], None, None]:
    """Each line with its number; None for the text of one that is too long."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(most + 1):
            number += 1
            if len(text) > most and not text.endswith(b"\n"):
                _skip_line(file)
                yield number, None
            else:
                yield number, text


def _skip_line(file: BinaryIO) -> None:
    while (piece := file.readline(_DISCARDED_BYTES)) and not piece.endswith(b"\n"):
        pass


def _checked(text: bytes, endpoint: str, check_model: Callable[[str], object]) -> InputLine:
    try:
        check_json_size(text, "the line")
        line = msgspec.json.decode(text, type=InputLine)
        body = msgspec.json.decode(line.body, type=_Peek)
    except msgspec.ValidationError as error:
        message = f"the line is not a request: {error}"
        raise RequestError(message, code="invalid_request") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the line is not valid JSON: {error}"
        raise RequestError(message, code="invalid_json_line") from error
    except RequestError as error:
        raise RequestError(error.message, code="invalid_json_line") from error
    num_chars = len(line.custom_id)
    for is_wrong, param, message in (
        (
            not 0 < num_chars <= MAX_CUSTOM_ID_CHARS,
            "custom_id",
            f"custom_id has {num_chars:,} characters; it must have 1 to {MAX_CUSTOM_ID_CHARS}",
        ),
        (line.method != "POST", "method", f'method is {cut(line.method)!r}; it must be "POST"'),
        (
            line.url != endpoint,
            "url",
            f"url is {cut(line.url)!r}; it must be the endpoint of the batch, {endpoint!r}",
        ),
        (
            body.stream not in (None, False),
            "stream",
            "body.stream is not supported in a batch: leave it out",
        ),
        (
            not isinstance(body.model, str),
            "model",
            "body.model is required; it must be a string",
        ),
    ):
        if is_wrong:
            code = "url_mismatch" if param == "url" else "invalid_request"
            raise RequestError(message, code=code, param=param)
    check_model(body.model)
    return line


FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # before a line is tried again


class LineClient:
    def __init__(self, app: ASGIApp) -> None:
        self._app = RequestLog(app)

    async def ask(self, path: str, body: bytes, owner: Mapping[str, Any]) -> dict[str, Any]:
        """The response, after as many tries as the engine is full or absent. `owner`: see
        `access_control.owner_state`."""
        wait_s = FIRST_WAIT_S
        while True:
            scope = _scope(path, owner)
            response = await self._try(scope, body)
            if record_of(scope).error not in RETRY_AFTER_S:
                return response
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _try(self, scope: Scope, body: bytes) -> dict[str, Any]:
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        sent = bytearray()
        status = 500  # if nothing is sent

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()  # no client disconnects
            raise AssertionError("nothing sets it")

        async def send(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += message.get("body", b"")

        await self._app(scope, receive, send)
        answer = msgspec.Raw(bytes(sent) or b"null")
        return {"status_code": status, "request_id": record_of(scope).id, "body": answer}


def _scope(path: str, owner: Mapping[str, Any]) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": dict(owner),
    }


OUTPUT, ERRORS = "output", "errors"


class _Reply(msgspec.Struct, frozen=True):
    usage: dict[str, Any] | None = None  # an error has none


class _Response(msgspec.Struct, frozen=True):
    body: _Reply | None = None


class _Known(msgspec.Struct, frozen=True):
    custom_id: str
    response: _Response | None = None  # of a request that expired there is none


class Results:
    """What is stored of a batch's, and what is added. Threads may share it."""

    def __init__(self, batch: Batch, files: FileStore) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._open = True
        self._ids = {kind: batch.results_id(kind) for kind in (OUTPUT, ERRORS)}
        self.done: set[str] = set()
        self.counts = dict.fromkeys(self._ids, 0)
        self.usage = BatchUsage()
        for kind, id in self._ids.items():
            for lines in files.results(id):
                for line in lines:
                    self._count(kind, line)

    def append(self, kind: str, custom_id: str, result: dict[str, Any]) -> bool:
        """Whether it was added: nothing is after `close`, and nothing twice."""
        with self._lock:
            if not self._open or custom_id in self.done:
                return False
            line = msgspec.json.encode(result) + b"\n"
            self._files.append(self._ids[kind], line)
            self._count(kind, line)
            return True

    def tell(self, batch: Batch) -> None:
        batch.completed, batch.failed = self.counts[OUTPUT], self.counts[ERRORS]
        batch.usage = self.usage

    def close(self) -> None:
        with self._lock:
            self._open = False

    def _count(self, kind: str, line: bytes) -> None:
        known = msgspec.json.decode(line, type=_Known)
        self.done.add(known.custom_id)
        self.counts[kind] += 1
        reply = None if known.response is None else known.response.body
        if reply is not None and reply.usage is not None:
            self.usage.add(reply.usage)
