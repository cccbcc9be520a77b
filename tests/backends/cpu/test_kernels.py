"""Whoever builds kernels in the background gives way while requests run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bundled import BUNDLED_PATH
from pippin.backends.mlx.cpu import kernels
from pippin.backends.mlx.cpu.kernels import Kernels
from processes import PATIENCE_SECONDS, environment, wait_until_gone

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="kernels are built in the background on Linux only"
)


@pytest.fixture
def building() -> Iterator[Kernels]:
    command = ["sh", "-c", "sleep 600 & wait"]  # a compiler, and whoever called it
    builder = kernels.start_builder(command)
    made = Kernels(Path("marker"), available=False, builder=builder)
    yield made
    made.close()
    assert builder.poll() is not None


def wait_for_state(pid: int, *states: str) -> str:
    """As /proc names them: T is stopped, S asleep. On a busy machine a signal takes its time."""
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (state := stat.read_text().rsplit(")", 1)[1].split()[0]) not in states:
        assert time.monotonic() < deadline, f"the builder is {state}, not {states}"
        time.sleep(0.01)
    return state


def is_stopped(made: Kernels) -> bool:
    assert made.builder is not None
    return wait_for_state(made.builder.pid, "T", "S") == "T"


def wait_until(made: Kernels, *, stopped: bool) -> None:
    assert made.builder is not None
    wait_for_state(made.builder.pid, "T" if stopped else "S")


def test_it_is_stopped_while_requests_run(building: Kernels) -> None:
    building.give_way(busy=True)
    wait_until(building, stopped=True)
    building.check_stop()
    assert is_stopped(building)
    building.give_way(busy=False)
    wait_until(building, stopped=False)


def test_under_endless_load_it_goes_on_after_a_while(
    building: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    building.give_way(busy=True)
    wait_until(building, stopped=True)
    monkeypatch.setattr(kernels, "LONGEST_STOP", 0.0)
    building.check_stop()
    wait_until(building, stopped=False)
    building.give_way(busy=True)  # and is not stopped again
    assert not is_stopped(building)


def test_closing_ends_it_even_if_it_is_stopped(building: Kernels) -> None:
    building.give_way(busy=True)
    wait_until(building, stopped=True)


def test_it_ends_with_a_server_that_is_killed_while_it_is_stopped() -> None:
    script = (
        "from pippin.backends.mlx.cpu.kernels import Kernels, start_builder\n"
        "import signal, time\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup has its children ignore it
        "made = Kernels(None, available=False, builder=start_builder(['sleep', '600']))\n"
        "made.give_way(busy=True)\n"
        "print(made.builder.pid, flush=True)\n"
        "time.sleep(600)"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert server.stdout is not None
    builder = int(server.stdout.readline())
    wait_for_state(builder, "T")
    server.kill()
    server.wait()
    server.stdout.close()
    wait_until_gone(builder)


def test_it_ends_with_an_engine_even_where_nobody_wakes_it() -> None:
    """As when it had yet to stop at the moment in which its engine was killed."""
    builder = (
        "import os, time\n"
        "from pippin.backends.mlx.cpu.warm import be_killed_with_parent\n"
        "be_killed_with_parent()\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(600)"
    )
    engine_code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {builder!r}], start_new_session=True)\n"
        "time.sleep(600)"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", engine_code], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    wait_for_state(pid, "T")
    engine.kill()
    engine.wait()
    engine.stdout.close()
    wait_until_gone(pid)


def test_without_a_builder_there_is_nothing_to_do() -> None:
    made = Kernels(None, available=False)
    made.give_way(busy=True)
    made.check_stop()
    made.close()


@pytest.mark.slow
def test_it_and_its_compilers_end_with_an_engine_that_is_killed() -> None:
    builder = (
        "import os, subprocess, threading, time\n"
        "from pippin.backends.mlx.cpu.warm import leave_with\n"
        "threading.Thread(target=leave_with, args=(os.getppid(),), daemon=True).start()\n"
        "print(subprocess.Popen(['sleep', '600']).pid, os.getpid(), flush=True)\n"
        "time.sleep(600)"
    )
    engine_code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {builder!r}], process_group=0)\n"
        "time.sleep(600)"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", engine_code], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert engine.stdout is not None
    pids = [int(pid) for pid in engine.stdout.readline().split()]
    engine.kill()
    engine.wait()
    engine.stdout.close()
    for pid in pids:
        wait_until_gone(pid)


def test_it_ends_with_an_engine_that_was_killed_before_it_had_begun(tmp_path: Path) -> None:
    """It takes a second to import what it needs; an engine may be gone by then."""
    engine_code = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from pippin.backends.mlx.cpu.kernels import Kernels\n"
        "kernels = Kernels(Path('marker'), available=False)\n"
        f"kernels.build_in_background(Path({str(BUNDLED_PATH)!r}), 'float32')\n"
        "print(kernels.builder.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    nothing_built = {**environment(), "TMPDIR": str(tmp_path)}
    engine = subprocess.run(
        [sys.executable, "-c", engine_code], env=nothing_built, stdout=subprocess.PIPE, check=False
    )
    wait_until_gone(int(engine.stdout))
