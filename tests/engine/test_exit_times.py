"""What an engine may do while it stops fits into the time that it has for that."""

from __future__ import annotations

from pippin.cache.disk.disk_store import MAX_SEGMENT_BYTES
from pippin.cli.service import STOP_MARGIN_S
from pippin.engine import build_loop, run
from pippin.engine.engine_spec import LAST_STEP_SECONDS, SLOWEST_DISK
from pippin.scheduler.request import FLUSH_SECONDS
from pippin.supervision import engine_process


def test_an_engine_has_time_to_write_behind_and_to_sync_before_it_exits_by_force() -> None:
    unsynced = MAX_SEGMENT_BYTES + build_loop.MOST_BATCH_BYTES
    writing = FLUSH_SECONDS + unsynced / SLOWEST_DISK
    assert writing + LAST_STEP_SECONDS <= run.EXIT_GRACE_SECONDS


def test_each_waits_longer_than_what_it_waits_for() -> None:
    assert run.EXIT_GRACE_SECONDS < engine_process.STOP_GRACE_SECONDS
    assert run.EXIT_GRACE_SECONDS < build_loop.STOP_GRACE_SECONDS, "or a restart has no disk tier"
    assert engine_process.STOP_GRACE_SECONDS < STOP_MARGIN_S
