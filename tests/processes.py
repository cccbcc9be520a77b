"""What tests need to start processes and to see them end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

# For what always comes: a machine that has much else to do may take this long.
PATIENCE_SECONDS = 120.0
# What is built once for all workers, and for the next run.
BUILT = Path(tempfile.gettempdir(), f"pippin-tests-{os.getuid()}")


def is_installed(package: str) -> bool:
    """Whether other processes can import it, even if this one keeps it out."""
    return PathFinder.find_spec(package) is not None


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def environment_without_compiler() -> dict[str, str]:
    """For servers whose kernels nobody needs: else each spends seconds on building some."""
    return environment() | {"PATH": ""}


def run_python(code: str, **env: str) -> str:
    """Standard output of `code` in a new interpreter that sees the same packages."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment(), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[str]
    url: str

    @property
    def engine_pid(self) -> int:
        (pid,) = children_of(self.process.pid)
        return pid

    def read_command(self) -> str:
        """The one that the banner offers, two lines below the address."""
        assert self.process.stdout is not None
        return [self.process.stdout.readline() for _ in range(2)][-1]


@contextmanager
def serve(
    *options: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    stderr: int | None = None,
) -> Iterator[Served]:
    """`pippin serve` on a free port, killed at the end if it still runs."""
    command = [sys.executable, "-m", "pippin", "serve", "--port", "0", *options]
    with subprocess.Popen(
        command, env=env or environment(), cwd=cwd, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as process:
        try:
            assert process.stdout is not None
            banner = process.stdout.readline()
            found = re.search(r"http://[^\s\"]+", banner)
            assert found, f"no address in {banner!r}"
            yield Served(process, found[0])
        finally:
            process.kill()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")  # a zombie that init has yet to reap is not running
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if listed.exists():
        return [int(child) for child in listed.read_text().split()]
    found = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False
    ).stdout
    return [int(child) for child in found.split()]


def wait_until(condition: Callable[[], object], message: str = "it never happened") -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.01)


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not is_running(pid), f"process {pid} is still there")
