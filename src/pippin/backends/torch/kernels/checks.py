"""Kernels against plain operations on this device, with this model's weights: in seconds, at load.

One layer of each kind with rows of noise, the experts, and the choice of tokens. Knows no graphs,
and imports no kernels before it is asked for them: Triton is not everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Literal, NamedTuple

import numpy as np
import torch

from pippin.backends.base import DecodeRow, PrefillRow, Proposal
from pippin.backends.fallbacks import Fallbacks
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.device import arrays_on
from pippin.backends.torch.graphs.steps import Forwarded, StepForward
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer
from pippin.backends.torch.models.parts import DenseMlp, ExpertMlp, Linear, Mlp
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import KeptInputs, Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.shapes import AttentionShape, DenseShape, LayerShape
from pippin.backends.torch.step import filters
from pippin.backends.torch.step.batches import (
    Batch,
    ChunkBatch,
    DecodeBatch,
    chunk_batch,
    decode_batch,
    take_chunks,
    take_rows,
)
from pippin.backends.torch.step.filters import LeastInTopP
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.step.words import (
    MOST_VERIFIED,
    StepSize,
    StepWords,
    room,
    span_for,
    width_for,
)
from pippin.types import GRID, Component

logger = logging.getLogger(__name__)

# Of the norm of a result. Rounding is a tenth of it, in sums of another order; another token, head
# or weight is all of it.
ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
NUM_TOKENS = (1, 5, 80)  # through experts
ROOM = room(128, 4)
WIDE = (8, 16, 32, 64, 128, 256)  # rows: tiles and kernels change with their number
MOST_ROWS = WIDE[-1]

LENGTHS = (GRID + 6, 3, 17)  # tokens that rows hold
# A chunk's first token, and how many there are: of two blocks behind others, of few, of a fresh
# row. The first row's state is kept between its blocks, too.
CHUNKS = ((GRID + 9, GRID + 6), (5, 2), (0, 40))
MAX_DEPTH = 2
DEPTHS = (2, 0, 1)  # of rows with drafts,
NUM_KEPT = (2, 1, 0)  # drafts of their last step,
COUNTS = (1, 1, 0)  # and how many of these were accepted

KINDS: dict[str, Callable[[LayerShape], bool]] = {
    "attention": lambda layer: layer.kind is Component.ATTENTION and not _window_of(layer),
    "windows": lambda layer: layer.kind is Component.ATTENTION and _window_of(layer) > 0,
    "recurrent layers": lambda layer: layer.kind is Component.STATE,
}


Future = FutureMap[torch.Tensor]


@dataclass(frozen=True)
class KernelSet:
    forward: Callable[
        [Decoder, Pools, torch.Tensor, FutureMap[torch.Tensor], KeptInputs], StepForward
    ]
    experts: Callable[[ExpertMlp, torch.Tensor], torch.Tensor]
    in_top_p: LeastInTopP


def our_kernels() -> KernelSet:
    from pippin.backends.torch.kernels.forward import KernelForward
    from pippin.backends.torch.kernels.layers import feed_forward
    from pippin.backends.torch.kernels.top_p import least_in_top_p

    return KernelSet(KernelForward, feed_forward, least_in_top_p)


@dataclass(frozen=True)
class Agreed:
    """Which kernels are used."""

    steps: bool  # those of decode steps, and all that are not of chunks or drafts alone
    chunks: bool  # of prompts; only with the others
    drafts: bool  # of steps that verify drafts; only with those of decode steps


ALL, NONE = Agreed(True, True, True), Agreed(False, False, False)


def our_kernels_agree(
    decoder: Decoder, max_len: int, num_rows: int, fallbacks: Fallbacks, *, drafts: bool = False
) -> Agreed:
    """On the current stream. Models of very short texts are not tried: rows do not fit.

    `num_rows`: of the largest step."""
    if max_len < 3 * GRID:
        return ALL
    with torch.inference_mode():
        return kernels_agree(decoder, our_kernels, fallbacks, num_rows, drafts=drafts)


def kernels_agree(
    decoder: Decoder,
    make: Callable[[], KernelSet],
    fallbacks: Fallbacks,
    num_rows: int = MOST_ROWS,
    *,
    drafts: bool = True,
) -> Agreed:
    """Those that do not are noted, and why."""
    agreed = ALL
    for check, off in _errors(decoder, make, num_rows, drafts):
        operation = f"plain operations are used for {check.kind}"
        match off:
            case Exception() as error:
                fallbacks.note(operation, f"{check.name}: {error}", error)
            case float() if off <= ROUNDING[decoder.dtype]:
                continue
            case _:  # it may be NaN
                fallbacks.note(
                    operation,
                    f"the kernels of {check.name} differ from them by {off:.1g} here, and by "
                    f"{ROUNDING[decoder.dtype]:.1g} at most they may",
                )
        match check.kind:
            case "prompts":
                agreed = replace(agreed, chunks=False)
            case "steps with drafts":
                agreed = replace(agreed, drafts=False)
            case "all steps":
                agreed = NONE
    return agreed


def kernel_errors(
    decoder: Decoder, num_rows: int = 1, *, drafts: bool, chunks: bool = True
) -> Iterator[tuple[str, float | None]]:
    """By what is checked: how far off it is; None if it cannot be run, which a warning explains.
    `chunks`: those of prompts, too."""
    for check, off in _errors(decoder, our_kernels, num_rows, drafts):
        if isinstance(off, Exception):
            logger.warning("%s: %s", check.name, off, exc_info=off)
        if chunks or check.kind != "prompts":
            yield check.name, None if isinstance(off, Exception) else off


class Check(NamedTuple):
    name: str
    kind: Literal["all steps", "prompts", "steps with drafts"] = "all steps"  # that need it


def _errors(
    decoder: Decoder, make: Callable[[], KernelSet], num_rows: int, drafts: bool
) -> Iterator[tuple[Check, float | Exception]]:
    """How far off, or of any kind from a compiler or driver: plain operations serve."""
    try:
        checks = list(_checks(decoder, make(), num_rows, drafts))
    except Exception as error:
        yield Check("kernels cannot be run"), error
        return
    for check, run in checks:
        try:
            yield check, run()
        except torch.OutOfMemoryError as error:  # of rows of noise: what runs is measured later
            logger.info("%s: not checked: %s", check.name, error)
        except Exception as error:
            yield check, error


def _checks(
    decoder: Decoder, kernels: KernelSet, most: int, drafts: bool
) -> Iterator[tuple[Check, Callable[[], float]]]:
    """With each, how far off it is. Kernels are compiled for the numbers of rows that will run."""
    for kind, alone in few_layers(decoder).items():
        for num_rows in (1, 3, *(n for n in WIDE if n <= width_for(most))):
            name = f"a decode step of {num_rows} rows with {kind}"
            yield Check(name), partial(_step_off, alone, kernels, StepSize(num_rows))
            size = StepSize(num_rows, MAX_DEPTH, span_for(MAX_DEPTH))
            if drafts and size.num_placed <= MOST_VERIFIED:
                check = Check(f"drafts of {num_rows} rows with {kind}", "steps with drafts")
                yield check, partial(_step_off, alone, kernels, size)
        yield (
            Check(f"chunks of prompts with {kind}", "prompts"),
            partial(_step_off, alone, kernels, ROOM),
        )
    experts = (layer.mlp for layer in decoder.layers if isinstance(layer.mlp, ExpertMlp))
    if (mlp := next(experts, None)) is not None:
        for num_tokens in NUM_TOKENS:
            check = Check(f"experts of {num_tokens} tokens")
            yield check, partial(_experts_off, mlp, num_tokens, kernels)
    yield Check("top_p"), partial(_top_p_off, decoder, kernels)


def _window_of(layer: LayerShape) -> int:
    return layer.mixer.window if isinstance(layer.mixer, AttentionShape) else 0


def few_layers(decoder: Decoder) -> dict[str, Decoder]:
    """A layer of each kind, by its name; experts, which are tried alone, are one dense layer.

    Rows hold cells in every model, so a recurrent layer has one of attention behind it.
    """
    found: dict[str, Decoder] = {}
    behind: tuple[tuple[LayerShape, DecoderLayer], ...] = ()
    every = tuple(zip(decoder.shape.layers, decoder.layers, strict=True))
    for name, is_one in KINDS.items():
        first = next((pair for pair in every if is_one(pair[0])), None)
        if first is not None:
            shape, layer = first
            dense = None if layer.mlp is None else DenseShape(0)  # its size is its weights'
            alone = replace(layer, number=0, mlp=_dense(layer.mlp))
            is_recurrent = shape.kind is Component.STATE
            kept = ((replace(shape, mlp=dense), alone), *(behind if is_recurrent else ()))
            shapes, layers = zip(*kept, strict=True)
            found[name] = replace(
                decoder, shape=replace(decoder.shape, layers=shapes), layers=layers
            )
            behind = behind or kept
    return found


def _dense(mlp: Mlp | None) -> Mlp | None:
    if isinstance(mlp, ExpertMlp):
        return DenseMlp(Linear(mlp.gate_up[0]), Linear(mlp.down[0]), mlp.shape.activation)
    return mlp


class NoisyStep:
    """A step of this size whose rows hold noise. Of drafts, some of the last step were kept.

    Cells and states share one memory in numbers of different sizes: noise is written where a slot
    holds it, as what is read there.
    """

    def __init__(self, decoder: Decoder, size: StepSize) -> None:
        self.size, self._decoder = size, decoder
        lengths = tuple(islice(cycle(LENGTHS), size.num_rows)) or tuple(at for at, _ in CHUNKS)
        num_rows, layout = len(lengths), PoolLayout(decoder.shape, decoder.dtype)
        num_cells = sum(lengths) + sum(new for _, new in CHUNKS) + num_rows
        num_cell_slabs = -(-num_cells // layout.cells_per_slab(Component.ATTENTION))
        num_slabs = num_rows + 2 * len(CHUNKS) + num_cell_slabs + 2
        self.pools = Pools(layout, num_slabs * layout.slab_bytes, decoder.device)
        self.pools.memory.zero_()
        self._generator = torch.Generator(decoder.device).manual_seed(0)
        self.rows = Rows(self.pools, num_rows, 4 * GRID)
        self.kept = KeptInputs(layout, num_rows, MAX_DEPTH, decoder.device)
        self.kept.inputs.normal_(generator=self._generator)
        self.future = FutureMap(arrays_on(decoder.device), num_rows, max_depth=MAX_DEPTH)
        slots = np.arange(1, num_rows + 1)
        for slot, length in zip(slots.tolist(), lengths, strict=True):
            self.rows.grow(slot, length)
            if length:
                self.rows.next_states(np.array([slot]))
                self._fill(slot, length)
        self.states: list[int] = []  # that it leaves
        self._words = StepWords(size, layout)
        self.batch: Batch = self._chunks() if size.num_tokens else self._decodes(slots)

    def _fill(self, slot: int, length: int) -> None:
        pools = self.pools
        cells, states = self.rows.held(slot, 0, length), self.rows.states[[slot]]
        for views, places in ((pools.kv, cells), ((*pools.recurrent, *pools.conv), states)):
            where = pools.index(places)
            for view in views:
                view[where] = torch.empty_like(view[where]).normal_(generator=self._generator)

    def _chunks(self) -> ChunkBatch:
        rng, vocab_size = np.random.default_rng(0), self._decoder.shape.vocab_size
        chunks = [
            PrefillRow(
                slot,
                start,
                rng.integers(0, vocab_size, new).astype(np.int32),
                captures=True,
                checkpoints=(start + GRID,) if new > GRID else (),
            )
            for slot, (start, new) in enumerate(CHUNKS, start=1)
        ]
        taken = take_chunks(chunks, self.rows, self.pools)
        self._words.put_chunks(taken, self.rows)
        self.states = [*taken.states_out.tolist(), *(tap.slab for tap in taken.taps)]
        return chunk_batch(taken, self.rows, self.pools)

    def _decodes(self, slots: np.ndarray) -> DecodeBatch:
        rows, pools, future = self.rows, self.pools, self.future
        where = pools.index(slots)
        future.stash(where, where % self._decoder.shape.vocab_size)
        depths = cycle(DEPTHS if self.size.span else (0,))
        if self.size.span:
            rows.num_kept[slots] = np.resize(NUM_KEPT, len(slots))
            counts = pools.index(np.resize(COUNTS, len(slots)))
            future.stash_lengths(where, pools.index(rows.lengths[slots]), counts)
        decodes = []
        for slot, depth in zip(slots.tolist(), depths, strict=False):
            position = int(rows.lengths[slot])
            drafts = Proposal(position + 1, np.arange(2, 2 + depth, dtype=np.int32))
            one = DecodeRow(slot, position, depth=depth, proposal=drafts if depth else None)
            decodes.append(one)
        sampling = Slots(len(slots), self._decoder.shape.vocab_size, torch.from_numpy)
        taken = take_rows(decodes, rows, pools)
        if self.size.span:
            self._words.put_verified(taken, rows, sampling)
        else:
            self._words.put_rows(taken, sampling)
        self.states = taken.arrays.states_out.tolist()
        return decode_batch(taken, rows, future, pools)

    def by(self, run: StepForward) -> Callable[[], list[torch.Tensor]]:
        words = torch.from_numpy(self._words.words).to(self._decoder.device)
        return lambda: self._read(run.run(self.size, words))

    def _read(self, forwarded: Forwarded) -> list[torch.Tensor]:
        batch = self.batch
        if not isinstance(batch, ChunkBatch):
            assert isinstance(batch, DecodeBatch)
            return [forwarded.logits[batch.places]]
        assert forwarded.every is not None
        assert forwarded.last is not None
        return [forwarded.every[: sum(batch.lengths)], forwarded.last[: len(batch.lengths)]]

    def plainly(self) -> list[torch.Tensor]:
        hidden = PlainForward(self._decoder, self.pools, self.kept).hidden(self.batch)
        if isinstance(self.batch, ChunkBatch):
            return [hidden, hidden[self.batch.last]]
        return [self._decoder.head(hidden)]

    def found(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """What a run returns and leaves, and everything as before it."""
        pools, state = self.pools, [self.pools.memory, self.kept.inputs]
        before = [tensor.clone() for tensor in state]
        found, states = run(), pools.index(np.array(self.states))
        found += [view[self.batch.held.cells] for view in pools.kv]
        found += [view[states] for view in (*pools.recurrent, *pools.conv)]
        if isinstance(self.batch, DecodeBatch):
            for slot, length in zip(self.batch.slots.tolist(), self.batch.lengths, strict=True):
                kept = self.kept.inputs[:, slot, : length - 1]
                found += [kept.clone()] if kept.numel() else []
        for tensor, content in zip(state, before, strict=True):
            tensor.copy_(content)
        return found


def _step_off(decoder: Decoder, kernels: KernelSet, size: StepSize) -> float:
    """Of what both return, and what they leave for the next step."""
    step = NoisyStep(decoder, size)
    run = kernels.forward(decoder, step.pools, step.rows.table, step.future, step.kept)
    expected = step.found(step.plainly)
    return _off(step.found(step.by(run)), expected)


def _experts_off(mlp: ExpertMlp, num_tokens: int, kernels: KernelSet) -> float:
    """Of tokens whose experts are clear: of equal shares any may be chosen."""
    weight = mlp.router.weight
    generator = torch.Generator(weight.device).manual_seed(num_tokens)
    x = torch.randn(num_tokens, weight.shape[1], generator=generator, device=weight.device)
    x = x.to(mlp.gate_up.dtype)
    num_chosen = mlp.shape.num_chosen
    is_clear = torch.ones(num_tokens, dtype=torch.bool, device=x.device)
    if num_chosen < mlp.shape.num_experts:
        shares = mlp.router(x.to(weight.dtype)).float().topk(num_chosen + 1, dim=-1).values
        is_clear = shares[:, -2] > shares[:, -1]
    found, expected = kernels.experts(mlp, x), mlp(x)
    if not is_clear.any():
        return 0.0
    return _off([found[is_clear]], [expected[is_clear]])


def _top_p_off(decoder: Decoder, kernels: KernelSet) -> float:
    """Of the kept tokens, how many are kept by one alone."""
    shape = decoder.shape
    generator = torch.Generator(decoder.device).manual_seed(0)
    x = torch.randn(2, shape.vocab_size, generator=generator, device=decoder.device)
    share = torch.tensor([0.5, 0.95], device=decoder.device)
    least = torch.zeros(2, device=decoder.device)
    found, expected = (
        x >= form(x, share, least)[:, None] for form in (kernels.in_top_p, filters.least_in_top_p)
    )
    num_others = (found != expected).sum() - 2  # where sums of rounded masses end
    return max(0.0, float(num_others / expected.sum()))


def _off(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The worst of several results; NaN if one is NaN."""
    each = [
        float((mine.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-20))
        for mine, theirs in zip(found, expected, strict=True)
    ]
    return float(np.max(each))
