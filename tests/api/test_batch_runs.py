"""Batches beside live requests, over restarts and crashes, and where the disk or a file is gone."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry
from scripted_engine import MODEL, ScriptedEngine, asking, hang, say, serving
from starlette.applications import Starlette
from test_batches import HELLO, client_of, finished, line, results, send, start

from builders import make_loop
from pippin.api.batches.batch import Batch
from pippin.api.batches.lines import ERRORS, OUTPUT, LineClient, LineRules, Results
from pippin.api.batches.routes import LOWEST_PRIORITY
from pippin.api.batches.runner import BatchMetrics, BatchOwner, BatchRunner
from pippin.api.batches.store import BatchStore, FileStore
from pippin.backends.fake import FakeBackend
from pippin.config import ServerConfig
from pippin.messages import Submit, TokenDelta
from processes import wait_until


class LoopEngine(ScriptedEngine):
    """The real scheduler on the toy model, one request at a time, which waits to be started."""

    def __init__(self) -> None:
        super().__init__(say(""))
        backend = FakeBackend(vocab_size=8192, num_slots=2)
        self._loop = make_loop(backend=backend, num_slots=1)
        self._queues: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.started = threading.Event()
        self.order: list[int] = []  # the priorities of requests, as they finish

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        queue = self._queues[submit.id] = asyncio.Queue()
        self._loop.submit(submit, None)
        self.submits.append(submit)
        self._stepping = self._stepping or asyncio.create_task(self._step())
        while True:
            delta = await queue.get()
            if delta.finish is not None:
                self.order.append(submit.priority)
            yield delta
            if delta.finish is not None:
                return

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            if self.started.is_set():
                for delta in self._loop.step():
                    self._queues[delta.id].put_nowait(delta)


@contextmanager
def loop_client(directory: Path, batch_running: int) -> Iterator[tuple[openai.OpenAI, LoopEngine]]:
    engine = LoopEngine()
    config = ServerConfig(batch_dir=str(directory), batch_running=batch_running)
    with (
        serving(engine, config) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as client,
    ):
        yield client, engine


def test_a_live_request_is_admitted_before_lines_that_wait(tmp_path: Path) -> None:
    with loop_client(tmp_path, batch_running=4) as (client, engine):
        batch = start(client, *(line(f"r{i}") for i in range(9)))
        wait_until(lambda: len(engine.submits) == 4)
        live = threading.Thread(
            target=httpx.post,
            args=(f"{client.base_url}chat/completions",),
            kwargs={"json": {**HELLO, "priority": -1_000}, "timeout": None},
        )
        live.start()
        wait_until(lambda: len(engine.submits) == 5)
        engine.started.set()
        live.join()
        assert finished(client, batch).request_counts.completed == 9
    assert engine.order == [-1_000] + [LOWEST_PRIORITY] * 9


def test_choices_of_a_line_count_against_the_limit_too(tmp_path: Path) -> None:
    with client_of(tmp_path, hang(), batch_running=3) as (client, engine):
        start(client, line("a", {**HELLO, "n": 20}), line("b"))
        wait_until(lambda: len(engine.submits) == 3)
        with asking(f"{client.base_url}chat/completions", HELLO):
            wait_until(lambda: len(engine.submits) == 4)
    assert [s.priority for s in engine.submits] == [LOWEST_PRIORITY] * 3 + [0]


# ---- restarts --------------------------------------------------------------------------------


def test_a_batch_goes_on_after_a_restart_with_what_has_no_result(tmp_path: Path) -> None:
    lines = [line(f"r{i}") for i in range(6)]
    with client_of(tmp_path, say("Hello."), hang(), batch_running=1) as (client, engine):
        batch = start(client, *lines)
        waiting = start(client, line("later"))
        wait_until(lambda: len(engine.submits) == 2)
    assert len(engine.aborted) == 1
    with client_of(tmp_path, say("Again.")) as (client, engine):
        done = finished(client, batch)
        found = results(client, done.output_file_id)
        assert finished(client, waiting).status == "completed"
    assert len(engine.submits) == 6, "five lines of the first, one of the second"
    texts = {
        id: row["response"]["body"]["choices"][0]["message"]["content"] for id, row in found.items()
    }
    assert texts == {"r0": "Hello."} | {f"r{i}": "Again." for i in range(1, 6)}
    assert done.request_counts.completed == 6
    usages = [row["response"]["body"]["usage"] for row in found.values()]
    assert done.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)


def test_a_crash_at_any_byte_of_the_results_loses_one_line_at_most(tmp_path: Path) -> None:
    batch = Batch("batch_1", "", "", "24h", "", 0, total=3)

    def files() -> FileStore:
        return FileStore(tmp_path, max_bytes=10_000, max_file_bytes=10_000)

    def row(id: str) -> dict[str, Any]:
        return {"custom_id": id, "text": 'é\n"{'}

    def fill(results: Results) -> None:
        for id in "abc":
            results.append(OUTPUT, id, row(id))
        results.append(ERRORS, "d", row("d"))
        results.close()

    fill(Results(batch, files()))
    path = files().path(batch.results_id(OUTPUT))
    whole = path.read_bytes()
    assert len(whole.splitlines()) == 3
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        store = files()
        results = Results(batch, store)
        assert results.counts[OUTPUT] == whole[:end].count(b"\n")
        assert store.nbytes == sum(p.stat().st_size for p in tmp_path.glob("*.jsonl"))
        fill(results)
        assert path.read_bytes() == whole
        assert results.counts == {OUTPUT: 3, ERRORS: 1}


def test_a_damaged_record_does_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    with client_of(tmp_path) as (client, _):
        good = finished(client, start(client, line("a")))
    for name in ("batch_0.json", "file-0.json"):
        (tmp_path / "all" / name).write_bytes(b'{"id":')
    with client_of(tmp_path) as (client, _):
        assert [batch.id for batch in client.batches.list()] == [good.id]
        assert len(list(client.files.list())) == 2


def test_a_batch_that_was_being_cancelled_is_cancelled_after_a_restart(tmp_path: Path) -> None:
    with client_of(tmp_path, hang()) as (client, engine):
        batch = start(client, line("a"))
        wait_until(lambda: len(engine.submits) == 1)
    change(tmp_path, batch.id, status="cancelling")
    with client_of(tmp_path) as (client, engine):
        assert finished(client, batch).status == "cancelled"
    assert not engine.submits


def change(directory: Path, id: str, **fields: Any) -> None:
    (record,) = directory.rglob(f"{id}.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), **fields}))


def test_a_batch_expires_with_its_window_and_says_so_for_each_line(tmp_path: Path) -> None:
    with client_of(tmp_path, say("Hello."), hang(), batch_running=1) as (client, engine):
        batch = start(client, *(line(f"r{i}") for i in range(5)))
        wait_until(lambda: len(engine.submits) == 2)
    change(tmp_path, batch.id, created_at=batch.created_at - 86_401)
    with client_of(tmp_path) as (client, engine):
        done = finished(client, batch)
        late = results(client, done.error_file_id)
        assert results(client, done.output_file_id).keys() == {"r0"}
    assert done.status == "expired"
    assert done.expired_at is not None
    assert late.keys() == {f"r{i}" for i in range(1, 5)}
    assert {row["error"]["code"] for row in late.values()} == {"batch_expired"}
    assert {row["response"] for row in late.values()} == {None}
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 4)
    assert not engine.submits


# ---- files and disks that are gone -----------------------------------------------------------


def test_a_file_that_is_deleted_while_its_batch_runs_is_still_read(tmp_path: Path) -> None:
    with loop_client(tmp_path, batch_running=1) as (client, engine):
        batch = start(client, *(line(f"r{i}") for i in range(4)))
        wait_until(lambda: len(engine.submits) == 1)
        client.files.delete(batch.input_file_id)
        engine.started.set()
        assert finished(client, batch).request_counts.completed == 4


def test_a_batch_without_its_file_fails_and_keeps_its_results(tmp_path: Path) -> None:
    with client_of(tmp_path, say("Hello."), hang(), batch_running=1) as (client, engine):
        batch = start(client, *(line(f"r{i}") for i in range(5)))
        waiting = start(client, line("a"))
        wait_until(lambda: len(engine.submits) == 2)
        client.files.delete(batch.input_file_id)
        client.files.delete(waiting.input_file_id)
    with client_of(tmp_path) as (client, engine):
        for each, ids in ((batch, {"r0"}), (waiting, set())):
            done = finished(client, each)
            assert done.status == "failed"
            assert done.errors.data[0].code == "input_file_not_found"
            assert results(client, done.output_file_id).keys() == ids
    assert not engine.submits


def test_a_full_disk_fails_the_batch_and_not_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, text: bytes) -> None:
        if file.tell():
            file.write(text[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(text)

    with client_of(tmp_path, batch_running=1) as (client, _):
        with monkeypatch.context() as patched:
            patched.setattr("pippin.api.batches.lines._write_all", full)
            done = finished(client, start(client, line("a"), line("b")))
        assert done.status == "failed"
        assert "No space left on device" in done.errors.data[0].message
        assert results(client, done.output_file_id).keys() == {"a"}
        assert finished(client, start(client, line("a"))).status == "completed"


def test_a_line_that_could_not_be_written_leaves_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, text: bytes) -> None:
        file.write(text[:-1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    batch = Batch("batch_1", "", "", "24h", "", 0)
    store = FileStore(tmp_path, max_bytes=10_000, max_file_bytes=10_000)
    results = Results(batch, store)
    results.append(OUTPUT, "a", {"custom_id": "a"})
    with monkeypatch.context() as patched:
        patched.setattr("pippin.api.batches.lines._write_all", full)
        with pytest.raises(OSError, match="No space left"):
            results.append(OUTPUT, "b", {"custom_id": "b", "text": "long"})
    results.append(OUTPUT, "c", {"custom_id": "c"})
    results.close()
    content = store.path(batch.results_id(OUTPUT)).read_bytes()
    assert content == b'{"custom_id":"a"}\n{"custom_id":"c"}\n'
    assert store.nbytes == len(content)


def test_a_batch_can_be_cancelled_before_its_first_step(tmp_path: Path) -> None:
    async def cancelled() -> Batch:
        files = FileStore(tmp_path, max_bytes=1, max_file_bytes=1)
        owner = BatchOwner({}, files, BatchStore(tmp_path))
        metrics = BatchMetrics(CollectorRegistry())
        rules = LineRules(1, check_model=MODEL.check_name)
        runner = BatchRunner(LineClient(Starlette()), rules, 1, metrics)
        batch = Batch("batch_1", "", "file-1", "24h", "", int(time.time()))
        runner.start(owner, batch)
        runner.cancel(batch)
        while not batch.is_finished:
            await asyncio.sleep(0.001)
        await runner.close()
        return batch

    assert asyncio.run(cancelled()).status == "cancelled"


def test_results_above_the_quota_fail_the_batch(tmp_path: Path) -> None:
    with client_of(tmp_path, batch_bytes=2_500) as (client, _):
        done = finished(client, start(client, *(line(f"r{i}") for i in range(6))))
        assert done.status == "failed"
        assert done.errors.data[0].code == "storage_limit_exceeded"
        client.files.delete(done.input_file_id)
        client.files.delete(done.output_file_id)
        assert send(client, "x" * 2_500).bytes == 2_500


def test_a_full_disk_while_a_batch_is_created_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with client_of(tmp_path) as (client, _):
        file = send(client, line("a"))
        monkeypatch.setattr("pippin.api.batches.store.write_whole", full)
        with pytest.raises(openai.InternalServerError, match="No space left"):
            client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert list(client.batches.list()) == []


def test_old_batches_are_forgotten_when_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin.api.batches.store.MAX_BATCHES", 2)
    with client_of(tmp_path, say("Hello."), hang()) as (client, _):
        finished(client, start(client, line("a")))
        kept = [start(client, line("b")).id for _ in range(2)]
        assert [batch.id for batch in client.batches.list()] == kept[::-1]
        with pytest.raises(openai.BadRequestError, match="2 batches have not finished"):
            start(client, line("c"))


def test_metrics_count_batches_and_their_requests(tmp_path: Path) -> None:
    with client_of(tmp_path, say("Hello."), hang()) as (client, engine):
        finished(client, start(client, line("a")))
        finished(client, start(client, line("a", {**HELLO, "temperature": 7})))
        start(client, line("b"))
        wait_until(lambda: len(engine.submits) == 2)
        engine.reason = "it has no numbers"
        metrics = httpx.get(f"{str(client.base_url).removesuffix('v1/')}metrics").text
    assert "pippin_batches_unfinished 1.0" in metrics
    assert 'pippin_batch_requests_total{result="completed"} 1.0' in metrics
    assert 'pippin_batch_requests_total{result="failed"} 1.0' in metrics
    assert "pippin_time_to_first_token_seconds_count 0.0" in metrics, "times are of live requests"
