"""One decode step as a function of arrays: plain, or compiled once for each shape of step.

A compiled step skips the model's Python; on GPUs its small operations are fused too. Shapes change
when rows join or leave and when tails are flushed, so only so many of them are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.attention.decode_step import DecodeStep, StepShape, Tree
from pippin.backends.mlx.attention.head_ropes import DeferredRopes, deferring
from pippin.backends.mlx.attention.views import PackedRowKV, RowKV, TableRowKV
from pippin.backends.mlx.gpu.added_norms import adding_later
from pippin.backends.mlx.layout import LayerCache, Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.recurrent.replay import DraftStates, Replay

MAX_COMPILED = 64  # shapes; one costs the host about a megabyte

Forward = Callable[[mx.array, list[Any]], mx.array]
# Logits, tails, states, and in a list of one or none what the logits are made of.
StepResult = tuple[mx.array, list[KV], list[list[mx.array]], list[mx.array]]
WithHidden = Callable[[mx.array, list[Any]], tuple[mx.array, mx.array | None]]


class DecodeForward:
    def __init__(
        self,
        layout: Layout,
        forward: Forward,
        *,
        compiled: bool = False,
        with_hidden: WithHidden | None = None,
    ) -> None:
        """`with_hidden`: the same as `forward`, where steps with drafts return hidden vectors."""
        self._layout = layout
        self._with_hidden = with_hidden
        self._forward = forward
        self._compiles = compiled
        self._compiled: OrderedDict[StepShape, Callable[[Tree], StepResult]] = OrderedDict()
        self.last: tuple[StepShape, bool] | None = None  # its shape, and whether it was compiled

    def __call__(self, shape: StepShape, tree: Tree) -> StepResult:
        self.last = shape, self._compiles
        return self._step_of(shape)(tree) if self._compiles else self._run(shape, tree)

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
        # The step does not hold its views: a cycle would keep tails, states and mains of past
        # steps until Python's cycle collector runs.
        step, layout = DecodeStep(self._layout, shape, tree), self._layout
        kv = [_view(step, layout.caches[i], place) for place, i in enumerate(layout.kv_indices)]
        replay = _replay(layout, tree)
        states = [
            _state_view(replay, layout.caches[i], entries)
            for i, entries in zip(layout.state_indices, tree["states"], strict=True)
        ]
        of_kind = {False: iter(kv), True: iter(states)}
        caches = layout.nest([next(of_kind[cache.is_state]) for cache in layout.caches])
        hidden, ropes, adds_later = None, None, False
        if shape.mains is not None and shape.drafts is None:
            adds_later = shape.mains.paths.adds_later
            norms = shape.mains.paths.norms
            if norms is not None:
                ropes = DeferredRopes(tree["offset"], norms)
        with deferring(ropes), adding_later(active=adds_later):
            if shape.drafts is not None and self._with_hidden is not None:
                logits, hidden = self._with_hidden(tree["tokens"], caches)
            else:
                logits = self._forward(tree["tokens"], caches)
        tails = [(view.tail[0], view.tail[1]) for view in kv]
        if shape.drafts is not None:
            found = [] if hidden is None else [hidden]
            entries = [view.entries() if shape.drafts.keeps else view.cache for view in states]
            return logits, tails, [list(held) for held in entries], found
        return logits[:, -1], tails, [list(view.cache) for view in states], []


def _replay(layout: Layout, tree: Tree) -> Replay | None:
    """Of a step that keeps drafts, or runs some that were kept."""
    if "counts" not in tree or not layout.state_indices:
        return None
    first = layout.caches[layout.state_indices[0]]
    num_kept = tree["states"][0][len(first.shapes)].shape[1]
    return Replay(tree["counts"], num_kept, tree["tokens"].shape[1])


def _state_view(replay: Replay | None, cache: LayerCache, entries: Sequence[mx.array]) -> Any:
    """What a recurrent layer sees."""
    if replay is not None:
        return DraftStates(cache, entries, replay)
    view: Any = ArraysCache(size=len(entries))
    view.cache = list(entries)
    return view


def _view(step: DecodeStep, cache: LayerCache, place: int) -> RowKV:
    """What an attention layer sees; `place`: of the cache among the KV caches."""
    mains = step.shape.mains
    if mains is None:
        return TableRowKV(step, cache, place)
    return (RowKV if mains.paths.kernel is None else PackedRowKV)(step, cache, place)
