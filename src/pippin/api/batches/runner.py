"""Runs batches: checks their lines, has them answered, and keeps the results.

Batches of one owner run one after another, those of different owners side by side; together they
have a limited number of lines in flight.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from pippin.api.batches.batch import Batch, LineError, Status
from pippin.api.batches.lines import (
    ERRORS,
    OUTPUT,
    InputLine,
    LineClient,
    Results,
    WaitingLines,
    check_lines,
)
from pippin.api.batches.store import BatchStore, Database, FileStore, new_id
from pippin.api.http.access_control import known_keys, owner_state, separates_owners
from pippin.config import ServerConfig
from pippin.errors import NotFound, PippinError, RequestError
from pippin.tasks import all_or_none

log = logging.getLogger(__name__)

RESULTS = {OUTPUT: "completed", ERRORS: "failed"}
EXPIRED = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


@dataclass(eq=False)
class BatchOwner:
    """The holder of an API key, or every client of a server without keys."""

    state: Mapping[str, Any]  # of its requests
    files: FileStore
    batches: BatchStore
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one of its batches runs at a time


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
        self._owners: dict[bytes, BatchOwner] = {}
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

    def of(self, owner: bytes) -> BatchOwner:
        if self._directory is None:
            raise NotFound(
                "this server stores no files and runs no batches: start it with --batch-bytes "
                "above 0"
            )
        if self._database is None:
            self._open(self._directory)
        return self._owners[owner]

    async def create(self, owner: BatchOwner, batch: Batch) -> None:
        await asyncio.to_thread(owner.batches.add, batch)
        self._start(owner, batch)

    async def cancel(self, owner: BatchOwner, batch: Batch) -> dict[str, Any]:
        """The batch as it was then: it may be cancelled before its record is written."""
        if batch.status == "cancelling":
            return batch.wire()
        if batch.status not in ("validating", "in_progress"):
            raise RequestError(f"Cannot cancel a batch with status '{batch.status}'.")
        batch.enter("cancelling", time.time())
        self._tasks[batch.id].cancel()
        shown = batch.wire()
        await asyncio.to_thread(owner.batches.save, batch)
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
        config, keys = self._config, known_keys(self._config).owners()
        database = Database(directory)
        share = config.batch_bytes // max(1, len(keys))
        try:
            for key in keys or [b""]:
                name, most = _name_of(key), config.batch_file_bytes
                self._owners[key] = BatchOwner(
                    owner_state(key, separates=separates_owners(config)) if key else {},
                    FileStore(database, name, max_bytes=share, max_file_bytes=most),
                    BatchStore(database, name),
                )
        except BaseException:
            database.close()
            raise
        self._database = database
        for owner in self._owners.values():
            for batch in owner.batches.batches():
                if not batch.is_finished:
                    self._start(owner, batch)

    def _start(self, owner: BatchOwner, batch: Batch) -> None:
        task = asyncio.create_task(self._run(owner, batch))
        self._tasks[batch.id] = task
        self._unfinished.inc()
        task.add_done_callback(lambda task: self._ended(owner, batch, task))

    def _ended(self, owner: BatchOwner, batch: Batch, task: asyncio.Task[None]) -> None:
        del self._tasks[batch.id]
        self._unfinished.dec()
        if task.cancelled():
            if batch.status == "cancelling" and not self._closing:  # before its first step
                self._start(owner, batch)
        elif (error := task.exception()) is not None:
            log.error("batch %s stopped; it goes on at the next start", batch.id, exc_info=error)

    async def _run(self, owner: BatchOwner, batch: Batch) -> None:
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

    async def _check(self, owner: BatchOwner, batch: Batch) -> None:
        if batch.status != "validating":
            return
        path, most = owner.files.path(batch.input_file_id), self._max_line_bytes
        async with self._checks:
            batch.total, batch.errors = await asyncio.to_thread(
                check_lines, path, batch.endpoint, most, self._check_model
            )
        batch.enter("failed" if batch.errors else "in_progress", time.time())
        await asyncio.to_thread(owner.batches.save, batch)

    async def _run_lines(self, owner: BatchOwner, batch: Batch) -> None:
        results = await asyncio.to_thread(Results, batch, owner.files)
        try:
            results.tell(batch)
            if len(results.done) < batch.total:
                with closing(self._waiting(owner, batch, results)) as lines:
                    await all_or_none(
                        self._work(owner, batch, lines, results)
                        for _ in range(min(self._num_lines, batch.total))
                    )
        finally:
            results.close()

    def _waiting(self, owner: BatchOwner, batch: Batch, results: Results) -> WaitingLines:
        path = owner.files.path(batch.input_file_id)
        return WaitingLines(path, self._max_line_bytes, results.done)

    async def _work(
        self, owner: BatchOwner, batch: Batch, lines: WaitingLines, results: Results
    ) -> None:
        while True:
            async with self._lines:
                line = await asyncio.to_thread(lines.next)
                if line is None:
                    return
                response = await self._client.ask(line.url, bytes(line.body), owner.state)
                kind = OUTPUT if response["status_code"] == 200 else ERRORS
                result = _result(line, response=response)
                await asyncio.to_thread(results.append, kind, line.custom_id, result)
                self._requests.labels(RESULTS[kind]).inc()
                results.tell(batch)

    def _finish(self, owner: BatchOwner, batch: Batch, end: Status) -> None:
        """The same again, if a crash came in between: the names of the files are."""
        try:
            self._list_results(owner, batch, end)
        except (OSError, PippinError) as error:
            end, batch.errors = "failed", [_reason(error)]
            log.error("the results of batch %s are not complete", batch.id, exc_info=error)
        batch.enter(end, time.time())
        self._save(owner, batch)

    def _save(self, owner: BatchOwner, batch: Batch) -> None:
        try:
            owner.batches.save(batch)
        except PippinError as error:
            log.error("batch %s goes on at the next start", batch.id, exc_info=error)

    def _list_results(self, owner: BatchOwner, batch: Batch, end: Status) -> None:
        results, files = Results(batch, owner.files), owner.files
        try:
            if end == "expired" and batch.total and files.path(batch.input_file_id).exists():
                with closing(self._waiting(owner, batch, results)) as lines:
                    while (line := lines.next()) is not None:
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
