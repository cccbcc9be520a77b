"""Asks whether a library computes on the CPU here, without importing it."""

from __future__ import annotations

import subprocess
import sys

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
