"""What drafts gained here, as `pippin doctor` measured it: one file, which a start reads.

A gain is of one model, backend, type, device and version, and no other finds it. Reads no weights
and imports no array library.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
from pathlib import Path

import msgspec
from platformdirs import user_cache_path

from pippin.backends.host import cpu_name, num_threads
from pippin.backends.nvidia import gpu_name
from pippin.config import ModelConfig
from pippin.version import __version__

LEAST_GAIN = 1.05  # times as fast: less may be chance
MOST_KEPT = 64  # gains in the file; the oldest are dropped
SCHEMA = 1
LIBRARIES = {"mlx": ("mlx", "mlx-lm"), "torch": ("torch", "triton")}

logger = logging.getLogger(__name__)


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a gain is of."""

    model: str  # a directory
    files: str  # a digest of their names, sizes and times
    backend: str
    dtype: str
    device: str
    versions: str


class Gain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    served: Served
    ratio: float  # of one greedy reply: how many times as fast
    same_reply: bool  # where rounding leaves no choice
    day: str

    @property
    def pays(self) -> bool:
        return self.same_reply and self.ratio >= LEAST_GAIN


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    gains: tuple[Gain, ...]


def gains_path() -> Path:
    return user_cache_path("pippin") / "draft_gains.json"


def served_by(model: ModelConfig) -> Served:
    """Of a resolved config."""
    folder = Path(model.model).resolve()
    return Served(
        model=str(folder),
        files=_digest(folder),
        backend=model.backend,
        dtype=model.dtype,
        device=_device(),
        versions=_versions(model.backend),
    )


def measured_gain(model: ModelConfig) -> Gain | None:
    """The last one of this model on this machine; None if there is none."""
    gains = _read()
    if not gains:
        return None
    served = served_by(model)
    return next((gain for gain in gains if gain.served == served), None)


def keep_gain(gain: Gain) -> None:
    """In place of an earlier one of the same. Raises OSError if the file cannot be written."""
    others = [each for each in _read() if each.served != gain.served]
    found = _File(SCHEMA, (*others[-MOST_KEPT + 1 :], gain))
    path = gains_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    new.replace(path)


def _read() -> tuple[Gain, ...]:
    path = gains_path()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s is not read, and says nothing of drafts: %s", path, error)
        return ()
    if found.schema != SCHEMA:
        logger.warning("%s is not read: its schema is %d, not %d", path, found.schema, SCHEMA)
        return ()
    return found.gains


def _digest(folder: Path) -> str:
    """Weights that were replaced in place have other times."""
    paths = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    states = [(path.name, (facts := path.stat()).st_size, facts.st_mtime_ns) for path in paths]
    return hashlib.blake2b(repr(states).encode(), digest_size=16).hexdigest()


def _device() -> str:
    """A GPU's speed counts, and so does the host's, which launches."""
    chosen = os.environ.get("MLX_DEFAULT_DEVICE")
    parts = [gpu_name(), cpu_name(), f"{num_threads()} threads", chosen]
    return ", ".join(part for part in parts if part)


def _versions(backend: str) -> str:
    names = LIBRARIES.get(backend, ())
    found = [f"{name} {version}" for name in names if (version := _version(name)) is not None]
    return ", ".join([f"pippin {__version__}", f"Python {platform.python_version()}", *found])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
