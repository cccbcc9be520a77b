"""The device's own account of its work, on the CPU."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import mlx.core as mx
import pytest

from pippin.backends.mlx.cpu.stream_clock import StreamClock, find_stream_clock

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or mx.default_device() != mx.Device(mx.cpu),
    reason="only Linux keeps account of the thread that mlx computes on",
)


@pytest.fixture
def clock() -> StreamClock:
    found = find_stream_clock()
    assert found is not None
    return found


def busy_shares(clock: StreamClock, host_does: Callable[[], None]) -> list[float]:
    """Several tries: other processes can hold any one of them up."""
    shares = []
    for _ in range(10):
        time.sleep(0.01)  # let the device go to sleep
        before = clock.read()
        host_does()
        after = clock.read()
        shares.append((after.busy - before.busy) / (after.at - before.at))
    return shares


def compute() -> None:
    x = mx.zeros((1 << 18,))
    for _ in range(20):
        x = mx.exp(x) * 0.1
    mx.eval(x)


def sleep() -> None:
    time.sleep(0.03)


def spin() -> None:
    deadline = time.perf_counter() + 0.03
    while time.perf_counter() < deadline:
        pass


@pytest.mark.slow
def test_a_device_with_work_is_busy(clock: StreamClock) -> None:
    """For as long as its thread was on a core, at least, and never longer than time has passed."""
    before, all_threads, this_thread = clock.read(), time.process_time(), time.thread_time()
    for _ in range(10):
        compute()
    on_core = time.process_time() - all_threads - (time.thread_time() - this_thread)
    after = clock.read()
    assert on_core > 0
    assert 0.8 * on_core <= after.busy - before.busy <= after.at - before.at + 0.01


@pytest.mark.parametrize("host_does", [sleep, spin])
def test_a_device_without_work_is_idle_whatever_the_host_does(
    clock: StreamClock, host_does: Callable[[], None]
) -> None:
    assert min(busy_shares(clock, host_does)) < 0.1  # what holds the device up makes it busier
