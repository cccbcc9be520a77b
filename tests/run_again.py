"""Stands for CUDA graphs off CUDA: runs again what it recorded, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

import torch

from pippin.backends.torch.graphs.capture import CaptureFailed, Recorded


class RunAgain:
    """Graphs of one memory: what a replay left is spoilt when another has run.

    Results are dataclasses of tensors.
    """

    def __init__(self, fails_at: Literal["begin", "run", "end"] | None = None) -> None:
        """`fails_at`: a stage at which every capture fails."""
        self._left: list[Any] = []
        self.fails_at = fails_at
        self.num_replays = 0

    def record(self, run: Callable[[], Any]) -> Recorded[Any]:
        self._fail_at("begin")
        result = run()
        self._fail_at("run")
        self._left.append(result)
        self._fail_at("end")

        def replay() -> None:
            self.num_replays += 1
            found = [tensor.clone() for tensor in _tensors(run())]
            for left in self._left:
                for tensor in _tensors(left):
                    tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
            for tensor, new in zip(_tensors(result), found, strict=True):
                tensor.copy_(new)

        return Recorded(result, replay)

    def _fail_at(self, stage: str) -> None:
        if self.fails_at == stage:
            raise CaptureFailed(f"no capture: {stage}")


def _tensors(result: Any) -> list[torch.Tensor]:
    """Themselves: `dataclasses.astuple` would copy them."""
    found = (getattr(result, field.name) for field in fields(result))
    return [tensor for tensor in found if tensor is not None]
