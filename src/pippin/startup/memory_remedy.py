"""What to do when the engine ran out of memory while it loaded a model. Knows no backend.

A backend that measures its memory names a remedy itself ("memory: ..."). This is for the others:
an allocation that failed inside a library, or a process that the system killed.
"""

from __future__ import annotations

import re
from pathlib import Path

from pippin.amounts import show_bytes
from pippin.backends.host import host_memory_bytes
from pippin.config import Config

SIGNS = re.compile(
    r"killed by SIGKILL|out of memory|bad_alloc|MemoryError|cannot allocate|unable to allocate"
    r"|attempting to allocate|malloc|ENOMEM",
    re.IGNORECASE,
)


def with_remedy(reason: str, config: Config) -> str:
    """Why a resolved config's model could not be loaded, with a remedy if memory was too small."""
    if reason.startswith("memory:") or not SIGNS.search(reason):
        return reason
    paths = [Path(path) for path in (config.model.model, config.engine.draft_model) if path]
    files = [file for path in paths for file in path.glob("model*.safetensors")]
    weights = sum(file.stat().st_size for file in files)
    if "killed by SIGKILL" in reason:
        reason += " while it loaded the model, probably because memory ran out"
    return (
        f"{reason}. The weights are {show_bytes(weights)} on disk, and this machine has "
        f"{show_bytes(host_memory_bytes())} of memory{_float32(config)}: stop other programs, use "
        "a smaller or quantized model, or lower --max-model-len and --max-running"
    )


def _float32(config: Config) -> str:
    """16-bit weights take twice their size on disk on a CPU, unless they are left as they are."""
    if config.model.dtype not in ("auto", "float32"):
        return ""
    return " (on a CPU 16-bit weights take twice that: --dtype bfloat16 keeps their size)"
