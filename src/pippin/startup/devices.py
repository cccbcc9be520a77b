"""Whether the GPUs exist that `--devices` names. Loads no library that computes.

An engine whose CUDA_VISIBLE_DEVICES names none of the machine's GPUs sees no GPU: it would compute
on the CPU, and so would every other one, each with all of the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from pippin.backends.nvidia import gpu_ids
from pippin.config import ServerConfig
from pippin.errors import ConfigError

UUID = "GPU-"  # what may be cut short; MIG-... names a part of a GPU, which is not looked up


def check_devices(server: ServerConfig) -> None:
    """Raises ConfigError."""
    if server.devices is None or (found := gpu_ids()) is None:
        return
    if not found:
        remedy = f"--replicas {server.num_replicas} starts engines on one device"
        if server.num_replicas == 1:
            remedy = "without it the engine uses the device that there is"
        raise ConfigError(
            f"devices is {server.devices!r}, and this machine has no NVIDIA GPU that its driver "
            f"shows: remove --devices; {remedy}"
        )
    for name in server.device_names:
        if not _exists(name, found):
            numbers = "0" if len(found) == 1 else f"0 to {len(found) - 1}"
            ids = f" ({', '.join(found)})" if any(found) else ""
            raise ConfigError(
                f"devices names GPU {name}, and this machine has {len(found)}: use {numbers}, or a "
                f"UUID{ids}"
            )


def _exists(name: str, found: Sequence[str]) -> bool:
    if name.isdigit():
        return int(name) < len(found)
    return not name.startswith(UUID) or any(each.startswith(name) for each in found)
