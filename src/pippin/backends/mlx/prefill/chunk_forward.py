"""A chunk of one prompt as a function of arrays, compiled once for its length.

What is before the chunk is listed (rows/listed_views.py), so the graph is the same however long
that is. While streams run, chunks are short and of few lengths, and to build the graph of one takes
the host as long as eight of its tokens take two cores. Other chunks run plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.attention.decode_step import Tree
from pippin.backends.mlx.attention.listed_kv import LISTED, lister_for
from pippin.backends.mlx.cpu.operations.calls import operations
from pippin.backends.mlx.head import Head
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.rows.cohorts import Cohort, list_cohorts
from pippin.backends.mlx.rows.decode_forward import Forward

LONGEST = 128  # tokens: to build the graph of a longer chunk is nothing to computing it

# Logits [1, 1, vocab] after the last token, and what the head read for it; then this chunk's keys
# and values by KV leaf, and states by state leaf.
ChunkResult = tuple[mx.array, mx.array, list[KV], list[list[mx.array]]]


class ListedChunkKV:
    """The cache view of one attention layer of a chunk whose beginning is listed."""

    def __init__(self, tree: Tree, place: int) -> None:
        self.offset = tree["start"]
        self._listing = tree["listing"]
        self._place = place
        self.new: KV | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.new = keys, values
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> str:
        return "causal"

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        ours = operations(*LISTED)
        assert ours is not None, "chunks are listed for operations of ours"
        assert self.new is not None, "keys come before queries"
        return ours.listed_attention(queries, *self.new, self._listing, scale, place=self._place)


class ChunkForward:
    """`compiled`: asked now and then, as kernels may be in the making."""

    def __init__(
        self, layout: Layout, forward: Forward, head: Head, compiled: Callable[[], bool]
    ) -> None:
        self._layout = layout
        self._forward = forward
        self._head = head
        self._may_compile = compiled
        self._compiled: dict[int, Callable[[Tree], ChunkResult]] = {}  # by number of tokens

    def takes(self, num_tokens: int) -> bool:
        suits = 1 < num_tokens <= LONGEST  # one token's arrays lie otherwise: for other kernels
        return suits and lister_for(self._layout) is not None and self._may_compile()

    def __call__(self, batch: ChunkBatch, prompt: PromptState) -> tuple[mx.array, mx.array]:
        """Logits and the hidden vector after the chunk; its views are filled as by a forward."""
        return self._fill(batch, self._step_of(batch.width)(self._tree(batch, prompt)))

    def run_plain(self, batch: ChunkBatch, prompt: PromptState) -> tuple[mx.array, mx.array]:
        return self._fill(batch, self._run(self._tree(batch, prompt)))

    def _fill(self, batch: ChunkBatch, result: ChunkResult) -> tuple[mx.array, mx.array]:
        logits, hidden, all_kv, all_states = result
        kv, states = iter(all_kv), iter(all_states)
        for leaf, view in zip(self._layout.leaves, batch.views, strict=True):
            if leaf.is_state:
                view.cache = list(next(states))
            else:
                view.new = tuple(next(kv))
        return logits, hidden

    def _step_of(self, num_tokens: int) -> Callable[[Tree], ChunkResult]:
        if num_tokens not in self._compiled:
            self._compiled[num_tokens] = mx.compile(self._run)
        return self._compiled[num_tokens]

    def _run(self, tree: Tree) -> ChunkResult:
        kv = [ListedChunkKV(tree, place) for place, _ in enumerate(self._layout.kv_indices)]
        states = [_state_view(entries) for entries in tree["states"]]
        views = (iter(states), iter(kv))
        caches = [next(views[0 if leaf.is_state else 1]) for leaf in self._layout.leaves]
        self._head.positions = mx.array([[tree["tokens"].shape[1] - 1]])
        try:
            logits = self._forward(tree["tokens"], self._layout.nest(caches))[:, -1:]
        finally:
            self._head.positions = None
        hidden = self._head.take_selected()
        assert hidden is not None, "the head is known"
        new = [view.new for view in kv if view.new is not None]
        return logits, hidden, new, [list(view.cache) for view in states]

    def _tree(self, batch: ChunkBatch, prompt: PromptState) -> Tree:
        ours = lister_for(self._layout)
        assert ours is not None
        return {
            "tokens": batch.tokens,
            "start": batch.offsets,
            "states": [self._states(index, prompt.states) for index in self._layout.state_indices],
            "listing": list_cohorts(ours, self._layout, _cohorts(prompt)),
        }

    def _states(self, index: int, held: Mapping[int, list[mx.array]]) -> list[mx.array]:
        leaf = self._layout.leaves[index]
        blanks = zip(leaf.shapes, leaf.dtypes, strict=True)
        return held.get(index) or [mx.zeros((1, *shape), dtype) for shape, dtype in blanks]


def _state_view(entries: Sequence[mx.array]) -> Any:
    view: Any = ArraysCache(size=len(entries))
    view.cache = list(entries)
    return view


def _cohorts(prompt: PromptState) -> list[Cohort]:
    if not prompt.kv:
        return []
    stored = {leaf: int(keys.shape[2]) for leaf, (keys, _) in prompt.kv.items()}
    return [Cohort.of_one(0, prompt.length, stored, prompt.kv)]
