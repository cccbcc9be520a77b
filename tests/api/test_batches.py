"""Batches with the official client: beside live requests, over restarts, without disk or file."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from prometheus_client import CollectorRegistry
from scripted_engine import (
    MODEL,
    Script,
    ScriptedEngine,
    answer_anything,
    asking,
    fail,
    hang,
    say,
    serving,
)
from starlette.applications import Starlette

from builders import make_loop
from pippin.api.batches.routes import LOWEST_PRIORITY
from pippin.api.batches.runner import ERRORS, OUTPUT, Batches, LineClient, Results
from pippin.api.batches.store import Batch, Database, OwnerStore, storage_errors
from pippin.backends.fake import FakeBackend
from pippin.config import LimitsConfig, ServerConfig
from pippin.messages import Submit, TokenDelta
from processes import wait_until

CHAT = "/v1/chat/completions"
HELLO = {"model": "stories", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 5}
BODIES = {
    CHAT: HELLO,
    "/v1/completions": {"model": "stories", "prompt": "Once", "max_tokens": 5},
    "/v1/embeddings": {"model": "stories", "input": ["Once", "upon"]},
    "/v1/responses": {"model": "stories", "input": "Hi.", "max_output_tokens": 5},
}


def line(custom_id: str, body: Any = HELLO, url: str = CHAT, method: str = "POST") -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


@contextmanager
def client_of(
    directory: Path, *scripts: Script, key: str = "mine", **options: Any
) -> Iterator[tuple[openai.OpenAI, ScriptedEngine]]:
    engine = ScriptedEngine(*(scripts or (say("Hello."),)))
    limits = options.pop("limits", None)
    config = ServerConfig(batch_dir=str(directory), **{"batch_running": 2} | options)
    with (
        serving(engine, config, limits) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client, engine


def change(directory: Path, statement: str, *values: Any) -> None:
    """While no server uses the directory."""
    with closing(sqlite3.connect(directory / "batches.sqlite3")) as database:
        assert database.execute(statement, values).rowcount == 1
        database.commit()


def send(client: openai.OpenAI, *lines: str) -> Any:
    content = "\n".join(lines).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch")


def start(client: openai.OpenAI, *lines: str, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = send(client, *lines)
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


def finished(client: openai.OpenAI, batch: Any) -> Any:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDS)
    return client.batches.retrieve(batch.id)


ENDS = ("completed", "failed", "expired", "cancelled")


def results(client: openai.OpenAI, id: str | None) -> dict[str, Any]:
    """By custom_id. None is there twice."""
    if id is None:
        return {}
    rows = [json.loads(row) for row in client.files.content(id).text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


def cached_of(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_answers_each_line_as_the_endpoint_does(tmp_path: Path, endpoint: Any) -> None:
    body = BODIES[endpoint]
    with client_of(tmp_path, answer_anything) as (client, engine):
        batch = start(
            client,
            *(line(f"r{i}", body, endpoint) for i in range(5)),
            endpoint=endpoint,
            metadata={"of": "a test"},
        )
        assert batch.status == "validating"
        assert batch.metadata == {"of": "a test"}
        assert batch.expires_at == batch.created_at + 86_400
        done = finished(client, batch)
        direct: Any = client.post(endpoint.removeprefix("/v1"), body=body, cast_to=object)
        found = results(client, done.output_file_id)
        assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert done.status == "completed"
    assert (done.errors, done.error_file_id) == (None, None)
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 5, 0)
    assert None not in (done.in_progress_at, done.finalizing_at, done.completed_at)
    assert found.keys() == {f"r{i}" for i in range(5)}
    for row in found.values():
        assert row.keys() == {"id", "custom_id", "response", "error"}
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["request_id"].startswith("req_")
        reply = row["response"]["body"]
        assert reply.keys() == direct.keys()
        assert reply.get("usage") is not None
    assert {s.priority for s in engine.submits[:-2]} == {LOWEST_PRIORITY}
    each = direct["usage"]
    sent = each.get("prompt_tokens", 0) + each.get("input_tokens", 0)
    assert done.usage.input_tokens == 5 * sent
    assert done.usage.total_tokens == 5 * each["total_tokens"]
    assert done.usage.output_tokens == done.usage.total_tokens - done.usage.input_tokens
    assert done.usage.input_tokens_details.cached_tokens == 5 * cached_of(each)
    assert done.usage.output_tokens_details.reasoning_tokens == 0


def test_a_line_that_its_endpoint_refuses_is_in_the_error_file(tmp_path: Path) -> None:
    wrong = {**HELLO, "temperature": 7}
    with client_of(tmp_path) as (client, _):
        done = finished(client, start(client, line("good"), line("bad", wrong)))
        found = results(client, done.error_file_id)
        assert results(client, done.output_file_id).keys() == {"good"}
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert found["bad"]["error"] is None


def test_a_line_cannot_ask_for_a_higher_priority(tmp_path: Path) -> None:
    with client_of(tmp_path) as (client, engine):
        finished(client, start(client, line("a", {**HELLO, "priority": 1_000})))
    assert [submit.priority for submit in engine.submits] == [LOWEST_PRIORITY]


@pytest.mark.parametrize("code", ["overloaded", "not_ready", "engine_dead"])
def test_a_line_that_finds_the_engine_full_or_absent_is_tried_again(
    tmp_path: Path, code: str
) -> None:
    with client_of(tmp_path, fail("full", code=code), say("Hello.")) as (client, engine):
        done = finished(client, start(client, line("a")))
        found = results(client, done.output_file_id)
    assert len(engine.submits) == 2
    assert found["a"]["response"]["status_code"] == 200
    assert done.error_file_id is None


LINE_FAULTS = {
    "invalid_json_line": '{"custom_id": ',
    "invalid_request": '{"custom_id": "x"}',
    "url_mismatch": line("x", url="/v1/embeddings"),
    "model_not_found": line("x", {**HELLO, "model": "gpt-9"}),
    "duplicate_custom_id": line("first"),
}


@pytest.mark.parametrize(("code", "bad"), LINE_FAULTS.items())
def test_a_file_with_a_wrong_line_fails_with_its_number(
    tmp_path: Path, code: str, bad: str
) -> None:
    with client_of(tmp_path) as (client, engine):
        done = finished(client, start(client, line("first"), "", bad, line("last")))
    assert done.status == "failed"
    assert done.failed_at is not None
    (error,) = done.errors.data
    assert (error.code, error.line) == (code, 3)
    assert not engine.submits


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (line("x", {**HELLO, "stream": True}), "body.stream is not supported in a batch"),
        (line("x", method="GET"), "method is 'GET'; it must be \"POST\""),
        (line(""), "custom_id has 0 characters; it must have 1 to 256"),
        (line("x" * 257), "custom_id has 257 characters"),
        (line("x", {"messages": []}), "body.model is required"),
        (line("x", []), "the line is not a request"),
        ("[" * 100_000 + "]" * 100_000, "nested 100,000 levels deep; at most 128"),
        ('{"custom_id": "\udcff"}'.replace("\udcff", "\\udcff"), "the line is not"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(tmp_path: Path, bad: str, words: str) -> None:
    with client_of(tmp_path) as (client, _):
        done = finished(client, start(client, bad))
    assert done.status == "failed"
    assert words in done.errors.data[0].message


def test_a_line_longer_than_a_body_is_reported_and_those_behind_it_are_checked(
    tmp_path: Path,
) -> None:
    with client_of(tmp_path, limits=LimitsConfig(max_body_bytes=2_000)) as (client, _):
        done = finished(client, start(client, line("a"), "x" * 3_000_000, "nonsense"))
    assert [(e.code, e.line) for e in done.errors.data] == [
        ("line_too_long", 2),
        ("invalid_json_line", 3),
    ]


def test_files_of_too_many_lines_or_none_fail(tmp_path: Path) -> None:
    with client_of(tmp_path) as (client, _):
        many = finished(client, start(client, "\n" * 1_000_000))
        empty = finished(client, start(client, "\n\n"))
    assert many.errors.data[0].code == "too_many_tasks"
    assert "more than 50,000 lines" in many.errors.data[0].message
    assert empty.errors.data[0].code == "empty_file"


def test_errors_of_a_file_are_limited(tmp_path: Path) -> None:
    with client_of(tmp_path) as (client, _):
        done = finished(client, start(client, *["nonsense"] * 2_000))
    assert len(done.errors.data) == 100


# ---- cancelled -------------------------------------------------------------------------------


def test_a_cancelled_batch_aborts_what_runs_and_keeps_what_there_is(tmp_path: Path) -> None:
    with client_of(tmp_path, say("Hello."), hang(), batch_running=1) as (client, engine):
        batch = start(client, *(line(f"r{i}") for i in range(6)))
        wait_until(lambda: len(engine.submits) == 2)
        cancelled = client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        assert cancelled.cancelling_at is not None
        done = finished(client, batch)
        found = results(client, done.output_file_id)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status"):
            client.batches.cancel(batch.id)
    assert done.status == "cancelled"
    assert found.keys() == {"r0"}
    assert len(engine.aborted) == 1
    assert len(engine.submits) == 2


def test_a_batch_that_waits_for_its_turn_is_cancelled(tmp_path: Path) -> None:
    with client_of(tmp_path, hang()) as (client, engine):
        first = start(client, line("a"))
        wait_until(lambda: len(engine.submits) == 1)
        second = start(client, line("b"))
        client.batches.cancel(second.id)
        assert finished(client, second).status == "cancelled"
        assert client.batches.retrieve(first.id).status == "in_progress"
        at_once = start(client, line("c"))
        client.batches.cancel(at_once.id)
        assert finished(client, at_once).output_file_id is None
    assert len(engine.submits) == 1


# ---- lists -----------------------------------------------------------------------------------


def test_batches_and_files_are_listed_in_pages(tmp_path: Path) -> None:
    with client_of(tmp_path) as (client, _):
        started = [start(client, line("a")).id for _ in range(5)]
        for id in started:
            finished(client, client.batches.retrieve(id))
        page = client.batches.list(limit=2)
        assert page.has_more
        assert [batch.id for batch in page.data] == started[:2:-1]
        assert [batch.id for batch in client.batches.list(limit=2)] == started[::-1]
        files = list(client.files.list(limit=3, order="asc"))
        assert len(files) == 10
        assert [file.created_at for file in files] == sorted(file.created_at for file in files)
        outputs = list(client.files.list(purpose="batch_output"))
        assert {file.purpose for file in outputs} == {"batch_output"}
        assert len(outputs) == 5
        with pytest.raises(openai.BadRequestError, match="after"):
            client.batches.list(after="batch_none")
        with pytest.raises(openai.BadRequestError, match="limit"):
            client.batches.list(limit=101)


def test_a_batch_of_wrong_fields_is_refused(tmp_path: Path) -> None:
    with client_of(tmp_path) as (client, _):
        file = send(client, line("a"))
        good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for wrong in (
            {"endpoint": "/v1/moderations"},
            {"completion_window": "1h"},
            {"metadata": {"a": 1}},
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            {"nonsense": 1},
        ):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                client.post("/batches", body=good | wrong, cast_to=object)
        with pytest.raises(openai.NotFoundError, match="No such File object: file-none"):
            client.post("/batches", body=good | {"input_file_id": "file-none"}, cast_to=object)
        done = finished(
            client,
            start(
                client, line("a"), output_expires_after={"anchor": "created_at", "seconds": 3600}
            ),
        )
        output = client.files.retrieve(done.output_file_id)
        assert output.expires_at == output.created_at + 3600
        with pytest.raises(openai.BadRequestError, match="names results"):
            client.post("/batches", body=good | {"input_file_id": output.id}, cast_to=object)


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


def stores(directory: Path, max_bytes: int = 10_000) -> tuple[Database, OwnerStore]:
    database = Database(directory)
    return database, OwnerStore(database, "", max_bytes=max_bytes, max_file_bytes=max_bytes)


def test_results_are_those_that_were_stored_and_none_twice(tmp_path: Path) -> None:
    batch = Batch("batch_1", "", "", "24h", "", 0, total=3)

    def row(id: str) -> dict[str, Any]:
        return {"custom_id": id, "text": 'é\n"{'}

    for ids in ("ab", "abc"):  # the second server finds what the first one stored
        database, files = stores(tmp_path)
        results = Results(batch, files)
        for id in ids:
            assert results.append(OUTPUT, id, row(id)) == (ids == "ab" or id == "c")
        results.append(ERRORS, "d", row("d"))
        results.close()
        assert not results.append(OUTPUT, "e", row("e")), "it is closed"
        assert results.counts == {OUTPUT: len(ids), ERRORS: 1}
        database.close()
    database, files = stores(tmp_path)
    for kind, stored in ((OUTPUT, "abc"), (ERRORS, "d")):
        lines = b"".join(chain.from_iterable(files.results(batch.results_id(kind)))).splitlines()
        assert [json.loads(line) for line in lines] == [row(id) for id in stored]
    assert files.nbytes == 4 * (len(msgspec.json.encode(row("a"))) + len("\n"))
    database.close()


def test_a_batch_that_was_being_cancelled_is_cancelled_after_a_restart(tmp_path: Path) -> None:
    with client_of(tmp_path, hang()) as (client, engine):
        batch = start(client, line("a"))
        wait_until(lambda: len(engine.submits) == 1)
    set_field(tmp_path, batch.id, status="cancelling")
    with client_of(tmp_path) as (client, engine):
        assert finished(client, batch).status == "cancelled"
    assert not engine.submits


def set_field(directory: Path, id: str, **fields: Any) -> None:
    for name, value in fields.items():
        sql = "UPDATE batches SET batch = CAST(json_set(batch, ?, ?) AS BLOB) WHERE id = ?"
        change(directory, sql, f"$.{name}", value, id)


def test_a_batch_expires_with_its_window_and_says_so_for_each_line(tmp_path: Path) -> None:
    with client_of(tmp_path, say("Hello."), hang(), batch_running=1) as (client, engine):
        batch = start(client, *(line(f"r{i}") for i in range(5)))
        wait_until(lambda: len(engine.submits) == 2)
    set_field(tmp_path, batch.id, created_at=batch.created_at - 86_401)
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
    def append(self: OwnerStore, id: str, line: bytes) -> None:
        if json.loads(line)["custom_id"] == "a":
            whole(self, id, line)
            return
        database = self._database
        database.rows("PRAGMA max_page_count = 1")  # it gets no larger
        try:
            whole(self, id, line + bytes(100_000))
        finally:
            database.rows("PRAGMA max_page_count = 1000000")

    whole = OwnerStore.append
    with client_of(tmp_path, batch_running=1) as (client, _):
        with monkeypatch.context() as patched:
            patched.setattr(OwnerStore, "append", append)
            done = finished(client, start(client, line("a"), line("b")))
        assert done.status == "failed"
        assert "disk is full" in done.errors.data[0].message
        assert results(client, done.output_file_id).keys() == {"a"}
        assert client.files.retrieve(done.output_file_id).bytes < 2_000
        assert finished(client, start(client, line("a"))).status == "completed"


def test_a_batch_can_be_cancelled_before_its_first_step(tmp_path: Path) -> None:
    async def cancelled() -> Batch:
        config = ServerConfig(batch_dir=str(tmp_path))
        batches = Batches(config, LineClient(Starlette()), 1, MODEL.check_name, CollectorRegistry())
        owner = batches.of(b"")
        batch = Batch("batch_1", "", "file-1", "24h", "", int(time.time()))
        await batches.create(owner, batch)
        await batches.cancel(owner, batch)
        while not batch.is_finished:
            await asyncio.sleep(0.001)
        await batches.close()
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
        with storage_errors():
            raise sqlite3.OperationalError("database or disk is full")

    with client_of(tmp_path) as (client, _):
        file = send(client, line("a"))
        monkeypatch.setattr(OwnerStore, "save", full)
        with pytest.raises(openai.InternalServerError, match="disk is full"):
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
