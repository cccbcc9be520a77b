"""One decode step as a function of arrays: plain, or compiled once for each shape of step.

A compiled step skips the model's Python; on GPUs its small operations are fused too. Shapes change
when rows join or leave and when tails are flushed, so only so many of them are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.decode_step import DecodeStep, StepShape, Tree
from pippin.backends.mlx.attention.step_views import StepViews
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV

MAX_COMPILED = 64  # shapes; one costs the host about a megabyte

Forward = Callable[[mx.array, list[Any]], mx.array]
StepResult = tuple[mx.array, list[KV], list[list[mx.array]]]  # logits, tails, states


@dataclass(frozen=True)
class RanStep:
    """The last step, for step records."""

    shape: StepShape | None = None
    compiled: bool = False


class DecodeForward:
    def __init__(
        self,
        layout: Layout,
        forward: Forward,
        *,
        compiled: bool = False,
    ) -> None:
        self._layout = layout
        self._forward = forward
        self._compiles = compiled
        self._compiled: OrderedDict[StepShape, Callable[[Tree], StepResult]] = OrderedDict()
        self.last = RanStep()

    def __call__(self, shape: StepShape, tree: Tree) -> StepResult:
        compiles = shape.mains.compiles and self._compiles
        self.last = RanStep(shape, compiles)
        return self._step_of(shape)(tree) if compiles else self._run(shape, tree)

    def _step_of(self, shape: StepShape) -> Callable[[Tree], StepResult]:
        step = self._compiled.get(shape)
        if step is None:
            step = mx.compile(lambda tree: self._run(shape, tree))
            self._compiled[shape] = step
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(shape)
        return step

    def _run(self, shape: StepShape, tree: Tree) -> StepResult:
        views = StepViews(DecodeStep(self._layout, shape, tree))
        logits = self._forward(tree["tokens"], views.caches)[:, -1]
        tails = [(view.tail[0], view.tail[1]) for view in views.kv]
        return logits, tails, [list(view.cache) for view in views.states]
