"""What the loop reports of itself: a record of each step, status, and flushing."""

from __future__ import annotations

import dataclasses
import io
import itertools
from pathlib import Path
from typing import Any

import pytest

from builders import make_client, make_prompt, oracle
from pippin.errors import LoadError
from pippin.metrics import EngineMetrics, StepLog, StepRecord, read_step_log
from pippin.types import StepForwards

both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


@both_modes
def test_every_step_leaves_a_record_in_order(overlap: bool) -> None:
    client = make_client(overlap=overlap, num_slots=2, chunk=64, cache=False)
    for number in range(3):
        client.submit(make_prompt(70, number), max_tokens=5)
    client.run()
    metrics = client.loop.scheduler.metrics
    records = list(metrics.records)
    assert [record.step for record in records] == list(range(metrics.steps))
    for record in records:
        assert record.planned <= record.dispatched <= record.launched
        assert record.launched <= record.device_done <= record.resumed < record.committed
        assert record.waited >= 0.0
    assert sum(record.prefill_tokens for record in records) == 3 * 70
    assert sum(record.decode_rows for record in records) == 3 * 4


def test_a_log_holds_every_record_as_it_was(tmp_path: Path) -> None:
    metrics = EngineMetrics(log=StepLog(tmp_path / "steps"))
    records = [record_of(step) for step in range(3)]
    records.append(
        dataclasses.replace(record_of(3), forwards=StepForwards(prefill=2, new_prefill=1))
    )
    for record in records:
        metrics.add(record)
        assert read_step_log(tmp_path / "steps")[-1] == record  # at once, not when it is closed
    assert metrics.log is not None
    metrics.log.close()
    assert read_step_log(tmp_path / "steps") == records


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot write a step log: .*nowhere"):
        StepLog(tmp_path / "nowhere" / "steps")


def test_a_disk_that_is_full_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(io.FileIO):
        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    client = make_client()
    log = client.loop.scheduler.metrics.log = StepLog(tmp_path / "steps")
    client.ask(make_prompt(30))
    num_written = len(read_step_log(tmp_path / "steps"))
    assert num_written == client.loop.scheduler.metrics.steps
    log._file.close()
    log._file = FullDisk(tmp_path / "full", "w")
    assert client.ask(make_prompt(40)).tokens == oracle(make_prompt(40))[0]
    assert client.loop.scheduler.metrics.steps > num_written + 1
    (line,) = caplog.messages
    assert "steps ends here: [Errno 28]" in line
    log.close()


def test_under_overlap_a_step_is_launched_before_the_last_one_is_committed() -> None:
    client = make_client(cache=False)
    client.ask(make_prompt(10), max_tokens=6)
    records = list(client.loop.scheduler.metrics.records)
    pairs = list(itertools.pairwise(records))[:5]
    assert all(after.launched < before.resumed for before, after in pairs)


def test_without_overlap_a_step_is_planned_after_the_last_one_is_committed() -> None:
    client = make_client(cache=False, overlap=False)
    client.ask(make_prompt(10), max_tokens=6)
    records = list(client.loop.scheduler.metrics.records)
    pairs = itertools.pairwise(records)
    assert all(after.planned > before.committed for before, after in pairs)


@both_modes
def test_ghosts_are_counted_where_they_are_paid_for(overlap: bool) -> None:
    client = make_client(overlap=overlap)
    stop = oracle(make_prompt(10), max_tokens=6)[0][2]
    client.ask(make_prompt(10), max_tokens=6, stop_ids=[stop])
    assert client.loop.scheduler.metrics.ghost_rows == (1 if overlap else 0)


def test_counters_tell_how_requests_ended() -> None:
    client = make_client(max_len=100)
    client.submit(make_prompt(5))
    client.submit(make_prompt(200))
    aborted = client.submit(make_prompt(6, 1))
    client.loop.abort(aborted.id)
    client.run()
    metrics = client.loop.scheduler.metrics
    ended = (metrics.requests_finished, metrics.requests_failed, metrics.requests_aborted)
    assert ended == (1, 1, 1)
    assert metrics.generated_tokens == 4


def test_status_and_flush() -> None:
    client = make_client(num_slots=3)
    client.ask(make_prompt(100))
    status = client.loop.status()
    assert (status["running"], status["waiting"], status["slots"]) == (0, 0, 3)
    assert status["memory"]["claimed_bytes"] == 0
    answers: list[dict[str, Any]] = []
    client.loop.flush_cache(answers.append)
    (freed,) = answers
    assert freed["freed_bytes"] > 0
    assert freed["kept_bytes"] == 0
    assert client.ask(make_prompt(100)).cached_tokens == 0


def test_flushing_keeps_what_a_prompt_is_being_restored_from() -> None:
    client = make_client()
    client.ask(make_prompt(100))
    reply = client.submit([*make_prompt(100), 5], max_tokens=20)
    client.step(1)
    answers: list[dict[str, Any]] = []
    client.loop.flush_cache(answers.append)
    assert answers[0]["kept_bytes"] > 0
    client.run()
    assert reply.tokens == oracle([*make_prompt(100), 5], max_tokens=20)[0]


def test_a_flush_frees_a_bounded_number_of_nodes_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams advance meanwhile, and what is still there is cached for no request."""
    monkeypatch.setattr("pippin.scheduler.traffic.MAX_FLUSHED", 3)
    client = make_client()
    for number in range(12):
        client.ask([*make_prompt(40), number, *make_prompt(60, number)])
    cache = client.loop.scheduler.cache
    assert cache is not None
    stream = client.submit(make_prompt(90, 50), max_tokens=200)
    while not stream.tokens:
        client.step()
    freed: list[int] = []
    free = cache.free_flushed
    monkeypatch.setattr(cache, "free_flushed", lambda most: freed.append(free(most)) or freed[-1])
    answers: list[dict[str, Any]] = []
    before, num_nodes = len(stream.tokens), cache.radix.num_nodes
    client.loop.flush_cache(answers.append)
    client.loop.flush_cache(answers.append)
    again = client.submit(make_prompt(40), max_tokens=1)
    while not answers:
        client.step()
    assert max(freed) == 3
    assert sum(freed) > num_nodes / 2
    assert len(stream.tokens) - before > 5
    assert again.cached_tokens == 0
    assert again.finish is not None, "it did not wait for the flush"
    assert [answer["freed_bytes"] > 0 for answer in answers] == [True, True]
    client.run()
    assert stream.tokens == oracle(make_prompt(90, 50), max_tokens=200)[0]
    client.loop.flush_cache()
    while cache.flushing:
        client.loop.step()
    assert cache.nbytes == 0
    assert client.loop.idle


@both_modes
def test_committing_is_timed_apart_from_planning_the_next_step(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SlowClock(monkeypatch)
    client = make_client(overlap=overlap, cache=False)
    scheduler = client.loop.scheduler
    now.takes(5.0, scheduler, "plan")
    now.takes(3.0, scheduler, "commit")
    client.ask(make_prompt(10), max_tokens=6)
    records = list(scheduler.metrics.records)
    assert {record.commit_seconds for record in records} == {3.0}


class SlowClock:
    """The loop's clock: it stands still but for the calls that are said to take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self._now = 0.0
        monkeypatch.setattr("pippin.scheduler.loop.perf_counter", lambda: self._now)

    def takes(self, seconds: float, owner: object, name: str) -> None:
        original = getattr(owner, name)

        def slow(*args: object) -> object:
            self._now += seconds
            return original(*args)

        self._monkeypatch.setattr(owner, name, slow)


def record_of(step: int) -> StepRecord:
    """Steps of one second: planned and built for 0.2 s, 0.7 s on the device, 0.1 s committed."""
    return StepRecord(
        step=step,
        planned=step,
        dispatched=step + 0.2,
        launched=step + 0.2,
        device_done=step + 0.9,
        resumed=step + 0.9,
        committed=step + 1.0,
        waited=0.0,
        prefill_tokens=0,
        decode_rows=1,
        ghosts=0,
    )


def test_idle_time_is_what_lies_between_done_and_dispatched() -> None:
    metrics = EngineMetrics()
    for step in range(5):
        metrics.add(record_of(step))
    assert metrics.device_idle_share == pytest.approx(0.3)
    assert metrics.host_hidden_share == pytest.approx(0.0)


def test_a_step_that_nobody_had_to_wait_for_counts_only_its_commit_as_work() -> None:
    """Done at its launch, for all we know; the next one was planned before it was committed."""
    metrics = EngineMetrics()
    for step in range(5):
        late = dataclasses.replace(
            record_of(step), device_done=step + 0.2, resumed=step + 1.2, committed=step + 1.3
        )
        metrics.add(late)
    assert metrics.device_idle_share == pytest.approx(1.0)
    assert metrics.host_hidden_share == pytest.approx(0.0)
