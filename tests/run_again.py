"""Stands for CUDA graphs off CUDA: runs again what it recorded, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from pippin.backends.torch.capture import Recorded


class RunAgain:
    """Graphs of one memory: what a replay left is spoilt when another has run.

    Results are dataclasses of tensors.
    """

    def __init__(self) -> None:
        self._left: list[Any] = []
        self.num_replays = 0

    def record(self, run: Callable[[], Any]) -> Recorded[Any]:
        result = run()
        self._left.append(result)

        def replay() -> None:
            self.num_replays += 1
            found = run()
            for left in self._left:
                for tensor in _tensors(left):
                    tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
            for tensor, new in zip(_tensors(result), _tensors(found), strict=True):
                tensor.copy_(new)

        return Recorded(result, replay)


def _tensors(result: Any) -> list[torch.Tensor]:
    """Themselves: `dataclasses.astuple` would copy them."""
    return [getattr(result, field.name) for field in fields(result)]
