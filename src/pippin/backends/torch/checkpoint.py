"""Reads a checkpoint's safetensors, one tensor at a time, into the type that is served.

Knows names and types; what a name means is the families' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from pippin.errors import LoadError


class Weights(Protocol):
    """Tensors by name: of a checkpoint, or made up."""

    def has(self, name: str) -> bool: ...

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        """In the served type, on the device; `exact`: float32, whatever is served."""
        ...


class CheckpointWeights:
    def __init__(
        self, files: dict[str, Any], device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self._files = files  # an open file by the name of each tensor in it
        self._device = device
        self.dtype = dtype

    def has(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> Iterable[str]:
        return self._files.keys()

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        tensor = self._stored(name)
        return tensor.to(self._device, torch.float32 if exact else self.dtype)

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._stored(name).dtype

    def _stored(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise LoadError(f"the checkpoint has no weight {name}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


@contextmanager
def open_weights(path: Path, device: torch.device) -> Iterator[CheckpointWeights]:
    """The weights of a directory's *.safetensors; open as long as the context lasts."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for part in sorted(path.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(part, framework="pt"))
            files |= dict.fromkeys(opened.keys(), opened)
        yield CheckpointWeights(files, device)
