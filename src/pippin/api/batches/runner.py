"""Runs batches: checks their lines, has them answered, and keeps the results.

Batches of one owner run one after another, those of different owners side by side; together they
have a limited number of lines in flight.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.types import ASGIApp, Message, Scope

from pippin.api.batches.store import (
    Batch,
    BatchUsage,
    Database,
    LineError,
    OwnerStore,
    Status,
    new_id,
)
from pippin.api.http.access_control import Keys
from pippin.api.http.answers import RequestLog, record_of
from pippin.api.requests.body import check_json_size
from pippin.config import ServerConfig
from pippin.errors import RETRY_AFTER_S, NotFound, PippinError, RequestError, cut
from pippin.tasks import all_or_none

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


def unanswered(path: Path, most: int, done: Container[str]) -> Iterator[InputLine]:
    """Lines of a checked file that have no result yet."""
    for _, text in _numbered(path, most):
        assert text is not None, "checked"
        if text.strip():
            line = msgspec.json.decode(text, type=InputLine)
            if line.custom_id not in done:
                yield line


def _numbered(path: Path, most: int) -> Iterator[tuple[int, bytes | None]]:
    """Each line with its number; None for the text of one that is too long."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(most + 1):
            number += 1
            if len(text) <= most or text.endswith(b"\n"):
                yield number, text
                continue
            while (piece := file.readline(_DISCARDED_BYTES)) and not piece.endswith(b"\n"):
                pass
            yield number, None


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
    if not 0 < num_chars <= MAX_CUSTOM_ID_CHARS:
        limit = f"it must have 1 to {MAX_CUSTOM_ID_CHARS}"
        raise _wrong("custom_id", f"custom_id has {num_chars:,} characters; {limit}")
    if line.method != "POST":
        raise _wrong("method", f'method is {cut(line.method)!r}; it must be "POST"')
    if line.url != endpoint:
        asked = f"it must be the endpoint of the batch, {endpoint!r}"
        raise _wrong("url", f"url is {cut(line.url)!r}; {asked}", code="url_mismatch")
    if body.stream not in (None, False):
        raise _wrong("stream", "body.stream is not supported in a batch: leave it out")
    if not isinstance(body.model, str):
        raise _wrong("model", "body.model is required; it must be a string")
    check_model(body.model)
    return line


def _wrong(param: str, message: str, code: str = "invalid_request") -> RequestError:
    return RequestError(message, code=code, param=param)


FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # before a line is tried again


class LineClient:
    def __init__(self, app: ASGIApp) -> None:
        self._app = RequestLog(app)

    async def ask(self, path: str, body: bytes, owner: Mapping[str, Any]) -> dict[str, Any]:
        """The response, after as many tries as the engine is full or absent. `owner`: see
        `Keys.state_of`."""
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

    def __init__(self, batch: Batch, files: OwnerStore) -> None:
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


log = logging.getLogger(__name__)

RESULTS = {OUTPUT: "completed", ERRORS: "failed"}
EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


class Batches:
    def __init__(
        self,
        config: ServerConfig,
        client: LineClient,
        max_line_bytes: int,
        check_model: Callable[[str], object],
        registry: CollectorRegistry,
    ) -> None:
        """`check_model` raises NotFound."""
        self._config = config
        self._directory: Path | None = None  # there are no files and no batches
        if config.batch_bytes and config.batch_dir is not None:
            self._directory = Path(config.batch_dir).expanduser()
        self._client = client
        self._max_line_bytes = max_line_bytes
        self._check_model = check_model
        self._num_lines = config.batch_running or 1
        self._lines = asyncio.Semaphore(self._num_lines)
        self._checks = asyncio.Semaphore(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = False
        self._owners: dict[bytes, OwnerStore] = {}
        self._database: Database | None = None
        self._unfinished = Gauge(
            "pippin_batches_unfinished",
            "Number of batches of /v1/batches that are being checked, wait or run.",
            registry=registry,
        )
        self._requests = Counter(
            "pippin_batch_requests",
            "Number of requests in batches that have a result, by result.",
            labelnames=["result"],
            registry=registry,
        )
        for result in RESULTS.values():
            self._requests.labels(result)

    def resume(self) -> None:
        """Go on with what an earlier server left, if it left anything."""
        if self._directory is not None and self._directory.exists():
            self._open(self._directory)

    def of(self, owner: bytes) -> OwnerStore:
        if self._directory is None:
            raise NotFound(
                "this server stores no files and runs no batches: start it with --batch-bytes "
                "above 0"
            )
        if self._database is None:
            self._open(self._directory)
        return self._owners[owner]

    async def create(self, owner: OwnerStore, batch: Batch) -> None:
        await asyncio.to_thread(owner.add_batch, batch)
        self._start(owner, batch)

    async def cancel(self, owner: OwnerStore, batch: Batch) -> dict[str, Any]:
        """The batch as it was then: it may be cancelled before its record is written."""
        if batch.status == "cancelling":
            return batch.wire()
        if batch.status not in ("validating", "in_progress"):
            raise RequestError(f"Cannot cancel a batch with status '{batch.status}'.")
        batch.enter("cancelling", time.time())
        self._tasks[batch.id].cancel()
        shown = batch.wire()
        await asyncio.to_thread(owner.save, batch)
        return shown

    async def close(self) -> None:
        """Abort what is in flight. Batches go on at the next start."""
        self._closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._database is not None:
            self._database.close()
            self._database = None
            self._owners.clear()

    def _open(self, directory: Path) -> None:
        config, keys = self._config, Keys(self._config)
        database = Database(directory)
        share = config.batch_bytes // max(1, len(keys.owners))
        try:
            for key in keys.owners or [b""]:
                name, most = _name_of(key), config.batch_file_bytes
                state = keys.state_of(key) if key else {}
                self._owners[key] = OwnerStore(
                    database, name, state, max_bytes=share, max_file_bytes=most
                )
        except BaseException:
            database.close()
            raise
        self._database = database
        for owner in self._owners.values():
            for batch in owner.batches.values():
                if not batch.is_finished:
                    self._start(owner, batch)

    def _start(self, owner: OwnerStore, batch: Batch) -> None:
        task = asyncio.create_task(self._run(owner, batch))
        self._tasks[batch.id] = task
        self._unfinished.inc()
        task.add_done_callback(lambda task: self._ended(owner, batch, task))

    def _ended(self, owner: OwnerStore, batch: Batch, task: asyncio.Task[None]) -> None:
        del self._tasks[batch.id]
        self._unfinished.dec()
        if task.cancelled():
            if batch.status == "cancelling" and not self._closing:  # before its first step
                self._start(owner, batch)
        elif (error := task.exception()) is not None:
            log.error("batch %s stopped; it goes on at the next start", batch.id, exc_info=error)

    async def _run(self, owner: OwnerStore, batch: Batch) -> None:
        limit = asyncio.timeout(max(0.0, batch.expires_at - time.time()))
        end: Status = "completed"
        if batch.status == "finalizing":  # until the server was stopped
            batch.status = "in_progress"
        try:
            async with limit:
                if batch.status == "cancelling":
                    end = "cancelled"
                else:
                    await self._check(owner, batch)
                    if batch.is_finished:
                        return
                    async with owner.turn:
                        await self._run_lines(owner, batch)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if batch.status != "cancelling" or task is None:  # the server stops
                self._save(owner, batch)  # what waited for a thread is not written any more
                raise
            task.uncancel()
            end = "cancelled"
        except (OSError, PippinError) as error:
            if limit.expired() and isinstance(error, TimeoutError):
                end = "expired"
            else:
                end, batch.errors = "failed", [_reason(error)]
                log.error("batch %s failed", batch.id, exc_info=error)
        if end != "cancelled":
            batch.enter("finalizing", time.time())  # it cannot be cancelled any more
        await asyncio.to_thread(self._finish, owner, batch, end)

    async def _check(self, owner: OwnerStore, batch: Batch) -> None:
        if batch.status != "validating":
            return
        path, most = owner.path(batch.input_file_id), self._max_line_bytes
        async with self._checks:
            batch.total, batch.errors = await asyncio.to_thread(
                check_lines, path, batch.endpoint, most, self._check_model
            )
        batch.enter("failed" if batch.errors else "in_progress", time.time())
        await asyncio.to_thread(owner.save, batch)

    async def _run_lines(self, owner: OwnerStore, batch: Batch) -> None:
        results = await asyncio.to_thread(Results, batch, owner)
        try:
            results.tell(batch)
            if len(results.done) < batch.total:
                lines, reading = self._unanswered(owner, batch, results), asyncio.Lock()
                await all_or_none(
                    self._work(owner, batch, lines, reading, results)
                    for _ in range(min(self._num_lines, batch.total))
                )
        finally:
            results.close()

    def _unanswered(self, owner: OwnerStore, batch: Batch, results: Results) -> Iterator[InputLine]:
        return unanswered(owner.path(batch.input_file_id), self._max_line_bytes, results.done)

    async def _work(
        self,
        owner: OwnerStore,
        batch: Batch,
        lines: Iterator[InputLine],
        reading: asyncio.Lock,
        results: Results,
    ) -> None:
        while True:
            async with self._lines:
                async with reading:
                    line = await asyncio.to_thread(next, lines, None)
                if line is None:
                    return
                response = await self._client.ask(line.url, bytes(line.body), owner.state)
                kind = OUTPUT if response["status_code"] == 200 else ERRORS
                result = _result(line, response=response)
                await asyncio.to_thread(results.append, kind, line.custom_id, result)
                self._requests.labels(RESULTS[kind]).inc()
                results.tell(batch)

    def _finish(self, owner: OwnerStore, batch: Batch, end: Status) -> None:
        """The same again, if a crash came in between: the names of the files are."""
        try:
            self._list_results(owner, batch, end)
        except (OSError, PippinError) as error:
            end, batch.errors = "failed", [_reason(error)]
            log.error("the results of batch %s are not complete", batch.id, exc_info=error)
        batch.enter(end, time.time())
        self._save(owner, batch)

    def _save(self, owner: OwnerStore, batch: Batch) -> None:
        try:
            owner.save(batch)
        except PippinError as error:
            log.error("batch %s goes on at the next start", batch.id, exc_info=error)

    def _list_results(self, owner: OwnerStore, batch: Batch, end: Status) -> None:
        results, files = Results(batch, owner), owner
        try:
            if end == "expired" and batch.total and files.path(batch.input_file_id).exists():
                for line in self._unanswered(owner, batch, results):
                    results.append(ERRORS, line.custom_id, _result(line, error=EXPIRED))
        finally:
            results.close()
            results.tell(batch)
            for kind, count in results.counts.items():
                if count:
                    name = f"{batch.id}_{kind}.jsonl"
                    files.add_results(batch.results_id(kind), name, batch.output_expires_s)
            batch.output_file_id = batch.results_id(OUTPUT) if batch.completed else None
            batch.error_file_id = batch.results_id(ERRORS) if batch.failed else None


def _result(line: InputLine, *, response: Any = None, error: Any = None) -> dict[str, Any]:
    id = new_id("batch_req_")
    return {"id": id, "custom_id": line.custom_id, "response": response, "error": error}


def _reason(error: OSError | PippinError) -> LineError:
    if isinstance(error, FileNotFoundError):
        message = "the input file was deleted before all its lines ran"
        return LineError("input_file_not_found", message)
    if isinstance(error, OSError):
        return LineError("storage_failed", f"the input file cannot be read: {error}")
    return LineError(error.code, f"a result could not be stored: {error.message}")


def _name_of(owner: bytes) -> str:
    """In the database, where no digest of a key is."""
    return hmac.digest(owner, b"pippin files of an API key", "sha256").hex()[:32] if owner else ""
