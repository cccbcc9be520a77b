"""The device's own account of its work, on the CPU."""

from __future__ import annotations

import platform
import time

import mlx.core as mx
import pytest

from pippin.backends.mlx.stream_clock import StreamClock, find_stream_clock

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or mx.default_device() != mx.Device(mx.cpu),
    reason="only Linux keeps account of the thread that mlx computes on",
)


@pytest.fixture
def clock() -> StreamClock:
    found = find_stream_clock()
    assert found is not None
    return found


def busy_share(clock: StreamClock, work: bool) -> float:
    before = clock.read()
    if work:
        x = mx.zeros((1 << 18,))
        for _ in range(20):
            x = mx.exp(x) * 0.1
        mx.eval(x)
    else:
        time.sleep(0.03)
    after = clock.read()
    return (after.busy - before.busy) / (after.at - before.at)


def test_a_device_with_work_is_busy(clock: StreamClock) -> None:
    assert busy_share(clock, work=True) > 0.8


def test_a_device_without_work_is_idle_whatever_the_host_does(clock: StreamClock) -> None:
    assert busy_share(clock, work=False) < 0.1


def test_the_host_thread_is_never_taken_for_the_device(clock: StreamClock) -> None:
    time.sleep(0.01)  # let it go to sleep after the probe
    before = clock.read()
    deadline = time.perf_counter() + 0.05
    while time.perf_counter() < deadline:
        pass
    after = clock.read()
    assert (after.busy - before.busy) / (after.at - before.at) < 0.5
