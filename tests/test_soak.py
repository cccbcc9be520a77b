"""Mixed load with an engine that is killed and frozen. `make soak` takes ten."""

from __future__ import annotations

import asyncio

import pytest

from soak import soak

SECONDS = 16.0
KILL_SECONDS = 5.0
HEARTBEAT_TIMEOUT = 4  # other tests run at the same time, and a process may have to wait for them
MOST_GROWTH_MB = 25.0  # in so short a time; a leak of every reply would be more


@pytest.mark.slow
def test_nothing_is_lost_while_engines_die() -> None:
    report = asyncio.run(soak(SECONDS, HEARTBEAT_TIMEOUT, KILL_SECONDS))
    print("\n".join(report.lines()))
    assert [name for name, _ in report.recoveries[:2]] == ["SIGKILL", "SIGSTOP"]
    assert report.ends["finished"] > 20
    assert report.ends["cut off (engine_dead)"] > 0
    assert report.ends["left"] > 0
    assert report.hostile["refused (400)"] > 0
    assert report.same_tokens > report.probe_tokens / 2
    assert report.growth_mb < MOST_GROWTH_MB
