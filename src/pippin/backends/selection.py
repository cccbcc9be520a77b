"""Which backend `auto` means on this machine, for this checkpoint. Imports no array library.

Metal is mlx's; on NVIDIA GPUs torch takes fewer launches a token. A checkpoint that torch does not
serve goes to mlx, and so does everything on CPUs.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Literal

from pippin.backends.torch.config import read_config, read_shape
from pippin.errors import LoadError

DRIVER = Path("/proc/driver/nvidia/version")


def choose_backend(checkpoint: Path) -> Literal["mlx", "torch"]:
    if sys.platform != "linux" or not DRIVER.exists() or not has_torch_for_cuda():
        return "mlx"
    return "torch" if torch_serves(checkpoint) else "mlx"


def has_torch_for_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA; importing it would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return version.is_file() and re.search(r"^cuda.*=\s*'\d", version.read_text(), re.M) is not None


def torch_serves(checkpoint: Path) -> bool:
    try:
        read_shape(read_config(checkpoint))
    except (LoadError, KeyError):  # whoever loads it says what is wrong
        return False
    return True
