"""Reads a checkpoint's safetensors, one tensor at a time, into the type that is served.

Knows names and types; what a name means is the families' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from pippin.errors import LoadError

MLX_PREFIX = "language_model.model."  # of mlx-lm's names, where other checkpoints' are nested


class Weights(Protocol):
    """Tensors by name: of a checkpoint, or made up."""

    def has(self, name: str) -> bool: ...

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        """In the served type, on the device; `exact`: float32, whatever is served."""
        ...

    def stored(self, name: str) -> torch.Tensor:
        """As it is stored, on the device."""
        ...

    def name_in_file(self, name: str) -> str: ...


class Stored(NamedTuple):
    file: Any  # open
    name: str  # in it


class CheckpointWeights:
    def __init__(
        self, found: dict[str, Stored], device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self._found = found
        self._device = device
        self.dtype = dtype

    def has(self, name: str) -> bool:
        return name in self._found

    @property
    def names(self) -> Iterable[str]:
        return self._found.keys()

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        tensor = self._stored(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise LoadError(
                f"{name} is stored as {tensor.dtype}, without scales that the torch backend reads"
            )
        return tensor.to(self._device, torch.float32 if exact else self.dtype)

    def stored(self, name: str) -> torch.Tensor:
        return self._stored(name).to(self._device)

    def name_in_file(self, name: str) -> str:
        return self._found[name].name

    def stored_dtype(self, *names: str) -> torch.dtype:
        """Of the first one that is there and of at least 16 bits, or else of the last."""
        for name in names:
            if self.has(name):
                found = self._stored(name).dtype
                if found.is_floating_point and found.itemsize > 1:
                    return found
        return self._stored(names[-1]).dtype

    def _stored(self, name: str) -> torch.Tensor:
        if name not in self._found:
            raise LoadError(f"the checkpoint has no weight {name}")
        stored = self._found[name]
        tensor: torch.Tensor = stored.file.get_tensor(stored.name)
        return tensor


@contextmanager
def open_weights(path: Path, device: torch.device, prefix: str) -> Iterator[CheckpointWeights]:
    """The weights of a directory's *.safetensors; open as long as the context lasts.

    `prefix`: of the decoder's names, which mlx-lm's checkpoints may nest the other way round.
    """
    with ExitStack() as stack:
        found: dict[str, Stored] = {}
        for part in sorted(path.glob("*.safetensors")):
            try:
                opened = stack.enter_context(safe_open(part, framework="pt"))
            except SafetensorError as error:
                reason = f"{part} cannot be read, perhaps its download was cut off: {error}"
                raise LoadError(reason) from error
            found |= {_usual_name(name, prefix): Stored(opened, name) for name in opened.keys()}  # noqa: SIM118
        yield CheckpointWeights(found, device)


def _usual_name(name: str, prefix: str) -> str:
    if name.startswith(MLX_PREFIX):
        return prefix + name.removeprefix(MLX_PREFIX)
    return name.removeprefix("language_model.")
