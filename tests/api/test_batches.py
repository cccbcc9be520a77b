"""Files and batches with the official client: what is sent, run, read, listed and cancelled."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_engine import Script, ScriptedEngine, answer_anything, fail, hang, say, serving

from pippin.api.batches.routes import LOWEST_PRIORITY
from pippin.config import LimitsConfig, ServerConfig
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
