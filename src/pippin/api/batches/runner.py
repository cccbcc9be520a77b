"""Runs batches: checks their lines, has them answered, and keeps the results.

Batches of one owner run one after another, those of
different owners side by side; together they have a limited number of lines in flight.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from pippin.api.batches.batch import Batch, LineError, Status
from pippin.api.batches.lines import (
    ERRORS,
    OUTPUT,
    InputLine,
    LineClient,
    LineRules,
    Results,
    WaitingLines,
    check_lines,
)
from pippin.api.batches.store import (
    BatchStore,
    Database,
    FileStore,
    new_id,
)
from pippin.api.http.access_control import known_keys, owner_state, separates_owners
from pippin.config import ServerConfig
from pippin.errors import NotFound, PippinError, RequestError
from pippin.tasks import all_or_none

RESULTS = {"output": "completed", "errors": "failed"}


class BatchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = Gauge(
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

    def count(self, kind: str) -> None:
        self._requests.labels(RESULTS[kind]).inc()


log = logging.getLogger(__name__)

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


class BatchRunner:
    def __init__(
        self,
        client: LineClient,
        rules: LineRules,
        num_lines: int,
        metrics: BatchMetrics,
    ) -> None:
        self._client = client
        self._rules = rules
        self._num_lines = num_lines
        self._metrics = metrics
        self._lines = asyncio.Semaphore(num_lines)
        self._checks = asyncio.Semaphore(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = False

    def start(self, owner: BatchOwner, batch: Batch) -> None:
        task = asyncio.create_task(self._run(owner, batch))
        self._tasks[batch.id] = task
        self._metrics.running.inc()
        task.add_done_callback(lambda task: self._ended(owner, batch, task))

    def cancel(self, batch: Batch) -> None:
        batch.enter("cancelling", time.time())
        self._tasks[batch.id].cancel()

    async def close(self) -> None:
        """Abort what is in flight. Batches go on at the next start."""
        self._closing = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, owner: BatchOwner, batch: Batch, task: asyncio.Task[None]) -> None:
        del self._tasks[batch.id]
        self._metrics.running.dec()
        if task.cancelled():
            if batch.status == "cancelling" and not self._closing:  # before its first step
                self.start(owner, batch)
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
        path = self._input(owner, batch)
        async with self._checks:
            checked = asyncio.to_thread(check_lines, path, batch.endpoint, self._rules)
            batch.total, batch.errors = await checked
        batch.enter("failed" if batch.errors else "in_progress", time.time())
        await asyncio.to_thread(owner.batches.save, batch)

    async def _run_lines(self, owner: BatchOwner, batch: Batch) -> None:
        results = await asyncio.to_thread(Results, batch, owner.files)
        try:
            self._count(batch, results)
            if len(results.done) < batch.total:
                path, most = self._input(owner, batch), self._rules.max_line_bytes
                with closing(WaitingLines(path, most, results.done)) as lines:
                    work = partial(self._work, owner, batch, lines, results)
                    await all_or_none(work() for _ in range(min(self._num_lines, batch.total)))
        finally:
            results.close()

    async def _work(
        self, owner: BatchOwner, batch: Batch, lines: WaitingLines, results: Results
    ) -> None:
        while True:
            async with self._lines:
                line = await asyncio.to_thread(lines.next)
                if line is None:
                    return
                answer = await self._client.ask(line.url, bytes(line.body), owner.state)
                kind = OUTPUT if answer.status == 200 else ERRORS
                result = _result(line, response=answer.wire())
                await asyncio.to_thread(results.append, kind, line.custom_id, result)
                self._metrics.count(kind)
                self._count(batch, results)

    def _finish(self, owner: BatchOwner, batch: Batch, end: Status) -> None:
        """The same again, if a crash came in between: the names of the files are."""
        try:
            self._list_results(owner, batch, end)
        except PippinError as error:
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
        results = Results(batch, owner.files)
        try:
            if end == "expired":
                self._write_expired(owner, batch, results)
        finally:
            results.close()
            self._count(batch, results)
            for kind in (OUTPUT, ERRORS):
                self._list(owner, batch, kind, results.counts[kind])

    def _write_expired(self, owner: BatchOwner, batch: Batch, results: Results) -> None:
        path = owner.files.path(batch.input_file_id)
        if not path.exists() or not batch.total:
            return
        with closing(WaitingLines(path, self._rules.max_line_bytes, results.done)) as lines:
            while (line := lines.next()) is not None:
                results.append(ERRORS, line.custom_id, _result(line, error=EXPIRED))

    def _list(self, owner: BatchOwner, batch: Batch, kind: str, count: int) -> None:
        if not count:
            return
        id = batch.results_id(kind)
        owner.files.add_results(id, f"{batch.id}_{kind}.jsonl", batch.output_expires_s)
        if kind == OUTPUT:
            batch.output_file_id = id
        else:
            batch.error_file_id = id

    def _count(self, batch: Batch, results: Results) -> None:
        batch.completed, batch.failed = results.counts[OUTPUT], results.counts[ERRORS]
        batch.usage = results.usage

    def _input(self, owner: BatchOwner, batch: Batch) -> Path:
        return owner.files.path(owner.files.get(batch.input_file_id).id)


def _result(line: InputLine, *, response: Any = None, error: Any = None) -> dict[str, Any]:
    id = new_id("batch_req_")
    return {"id": id, "custom_id": line.custom_id, "response": response, "error": error}


def _reason(error: OSError | PippinError) -> LineError:
    if isinstance(error, NotFound | FileNotFoundError):
        message = "the input file was deleted before all its lines ran"
        return LineError("input_file_not_found", message)
    if isinstance(error, OSError):
        return LineError("storage_failed", f"the input file cannot be read: {error}")
    return LineError(error.code, f"a result could not be stored: {error.message}")


class Batches:
    def __init__(self, config: ServerConfig, runner: BatchRunner) -> None:
        self._config = config
        self._directory: Path | None = None  # there are no files and no batches
        if config.batch_bytes and config.batch_dir is not None:
            self._directory = Path(config.batch_dir).expanduser()
        self._runner = runner
        self._owners: dict[bytes, BatchOwner] = {}
        self._database: Database | None = None

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
        self._runner.start(owner, batch)

    async def cancel(self, owner: BatchOwner, batch: Batch) -> dict[str, Any]:
        """The batch as it was then: it may be cancelled before its record is written."""
        if batch.status == "cancelling":
            return batch.wire()
        if batch.status not in ("validating", "in_progress"):
            raise RequestError(f"Cannot cancel a batch with status '{batch.status}'.")
        self._runner.cancel(batch)
        shown = batch.wire()
        await asyncio.to_thread(owner.batches.save, batch)
        return shown

    async def close(self) -> None:
        await self._runner.close()
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
                    self._runner.start(owner, batch)


def _name_of(owner: bytes) -> str:
    """In the database, where no digest of a key is."""
    return hmac.digest(owner, b"pippin files of an API key", "sha256").hex()[:32] if owner else ""
