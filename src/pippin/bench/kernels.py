"""Makes sure that compiled decode steps are ready before anything is timed. Knows no model.

On Linux CPUs the kernels of a decode step are built once per machine and model. A benchmark that
began before they were there would time two different programs.
"""

from __future__ import annotations

import subprocess
import sys

from pippin.bench.errors import BenchError
from pippin.bench.results.report import say

# In a process of its own: on a GPU, or without a C++ compiler, it has nothing to do.
BUILD = """
import sys
from pathlib import Path
from pippin.backends.mlx.cpu import warm
from pippin.backends.mlx.cpu.kernels import Kernels
from pippin.backends.mlx.device import on_cpu
from pippin.backends.mlx.load import load

path, dtype = sys.argv[1:]
if on_cpu():
    loaded = load(Path(path), dtype=dtype)
    kernels = Kernels.of(loaded)
    if kernels.marker is not None and not kernels.ready():
        warm.build(loaded)
"""

ON_CPU = {
    "mlx": "from pippin.backends.mlx.device import on_cpu; print(on_cpu())",
    "torch": (
        "import torch; print(not (torch.cuda.is_available() or torch.backends.mps.is_available()))"
    ),
}


def computes_on_cpu(library: str) -> bool:
    """Whether mlx or torch does: asked in a process of its own, since this one imports neither."""
    answer = subprocess.check_output([sys.executable, "-c", ON_CPU[library]], text=True)
    return answer.split()[-1] == "True"


def build_kernels(model_dir: str, dtype: str) -> None:
    """Returns when decode steps of this checkpoint can be compiled, or never will be."""
    say("making sure that kernels are built: half a minute, the first time")
    ran = subprocess.run(
        [sys.executable, "-c", BUILD, model_dir, dtype], capture_output=True, text=True
    )
    if ran.returncode != 0:
        raise BenchError(f"building kernels failed:\n{ran.stderr[-2000:].strip()}")
