"""Compiled decode steps on Linux CPUs, without making anybody wait for the C++ compiler.

There `mx.compile` calls g++ for every new kernel and keeps what it built in a temporary directory.
A decode step needs some forty kernels: half a minute, once per machine and model. So a server
starts with plain steps while a process in the background builds the kernels, and changes over when
a marker says that they are all there. On GPUs kernels are built in no time: steps are compiled at
once.

The process gives way: while requests run it is stopped. Two threads of a product that wait for each
other on two cores, one of which somebody else has, are ten times as slow. Under load that does not
end it goes on after a few minutes all the same.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from pippin.backends.mlx.cpu.compiler import compile_available, kernel_dir
from pippin.backends.mlx.cpu.operations.calls import operations
from pippin.backends.mlx.device import on_cpu
from pippin.backends.mlx.load import LoadedModel

LONGEST_STOP = 240.0  # seconds, all together


def marker_path(loaded: LoadedModel) -> Path:
    """Exists once every kernel of this model's decode step, as this code has it, is built."""
    ours = operations()
    in_use = None if ours is None else sorted(ours.left_out)
    facts = (type(loaded.model).__module__, loaded.layout, in_use)
    digest = hashlib.sha256(repr(facts).encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return kernel_dir() / f"pippin-{digest.hexdigest()[:16]}"


def start_builder(command: list[str]) -> subprocess.Popen[bytes]:
    """With its compilers in a group of their own, to be stopped together.

    But in our session: if we are killed while they are stopped, the system wakes and ends them.
    """
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, process_group=0)


@dataclass
class Kernels:
    """Whether decode steps may be compiled now."""

    marker: Path | None  # None: no compiler, or none is needed
    available: bool
    builder: subprocess.Popen[bytes] | None = None
    _stopped_at: float | None = None
    _stopped_for: float = 0.0

    @classmethod
    def of(cls, loaded: LoadedModel) -> Kernels:
        if not compile_available().available:
            return cls(None, available=False)
        if not on_cpu():
            return cls(None, available=True)
        marker = marker_path(loaded)
        return cls(marker, available=marker.exists())

    def ready(self) -> bool:
        if not self.available and self.marker is not None and self.marker.exists():
            self.available = True
        return self.available

    def build_in_background(self, path: Path, dtype: str) -> None:
        """Start a process that builds what is missing, out of everybody's way."""
        if self.available or self.marker is None:
            return
        module = "pippin.backends.mlx.cpu.warm"
        arguments = [str(path), dtype, str(os.getpid())]
        self.builder = start_builder([sys.executable, "-m", module, *arguments])

    def give_way(self, *, busy: bool) -> None:
        """Stop the builder while requests run; let it go on in between."""
        if self.builder is None or self.builder.poll() is not None:
            return
        if busy and self._stopped_at is None and self._stopped_for < LONGEST_STOP:
            self._stopped_at = monotonic()
            self._signal(signal.SIGSTOP)
        elif not busy:
            self._go_on()

    def check_stop(self) -> None:
        """Called now and then while requests run."""
        if self._stopped_at is not None:
            stopped_for = self._stopped_for + monotonic() - self._stopped_at
            if stopped_for >= LONGEST_STOP:
                self._go_on()

    def _go_on(self) -> None:
        if self._stopped_at is not None:
            self._stopped_for += monotonic() - self._stopped_at
            self._stopped_at = None
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.builder is not None
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.builder.pid, number)

    def close(self) -> None:
        if self.builder is not None and self.builder.poll() is None:
            self._go_on()
            self._signal(signal.SIGTERM)
            self.builder.wait()
