"""Decode rows whose steps verify drafts.

    one row's tail:   [ tokens that the row holds | input token, drafts | what was rejected ]
                        length less its main        this step's           overwritten later

A step accepts as many drafts as it finds right, so each row writes its tail where the row itself
ends, by the length that the device has of it (FutureMap). The host's `Row.length` is an upper bound
until the step has been waited for. To move tails into mains exact lengths are needed: then, every
few dozen steps, the step in flight is waited for.

Operations of ours read them by a KV table (attention/views.py), or a kernel or plain operations
attend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from pippin.backends.base import DecodeRow, Proposal
from pippin.backends.mlx.attention.decode_step import DraftsShape, PackedShape, StepShape, Tree
from pippin.backends.mlx.attention.packed_rows import AttentionPaths
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.prefill.batch import PromptState
from pippin.backends.mlx.recurrent.replay import ReplayedDeltaNet, delta_layers
from pippin.backends.mlx.rows.decode_forward import StepResult
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.backends.mlx.step.pending import MLXPending
from pippin.backends.mlx.step.sampler import noise_words, send
from pippin.backends.sampling.sampler import SampleRow
from pippin.backends.step.drafts import NOT_DETERMINISTIC
from pippin.backends.step.slots import FutureMap, SlotTable

NONE = -1  # equals no token that is sampled


@dataclass(frozen=True)
class Proposals:
    """What the host proposes for each row of a step: tokens by position, as one table."""

    starts: np.ndarray  # int32 [rows]: the position of the first
    tokens: np.ndarray  # int32 [rows, n], then NONE

    @classmethod
    def of(cls, proposals: Sequence[Proposal | None]) -> Proposals:
        longest = max((len(found.tokens) for found in proposals if found is not None), default=0)
        table = np.full((len(proposals), longest + 1), NONE, dtype=np.int32)
        starts = np.zeros(len(proposals), dtype=np.int32)
        for row, found in enumerate(proposals):
            if found is not None:
                starts[row] = found.start
                table[row, : len(found.tokens)] = found.tokens
        return cls(starts, table)

    def at(self, positions: mx.array) -> mx.array:
        """int32 [rows, n] of positions [rows, n]; NONE where nothing is proposed."""
        last = self.tokens.shape[1] - 1  # a column of NONE
        place = positions - mx.array(self.starts)[:, None]
        place = mx.where(place < 0, last, mx.minimum(place, last))
        return mx.take_along_axis(mx.array(self.tokens), place, axis=1)


@dataclass(eq=False)
class Unsure:
    """Drafts of a step in flight, which may be rejected."""

    depth: int


@dataclass
class Bound:
    """What a row's length as the host knows it is made of."""

    unsure: list[Unsure] = field(default_factory=list)
    kept: bool = False  # the row's last step had drafts: its state may lack some
    num_accepted: int = 0  # of these, where nothing is unsure

    @property
    def num_unsure(self) -> int:
        return sum(part.depth for part in self.unsure)


@dataclass(frozen=True)
class VerifyStep:
    """A step's rows by index, as they are before it is known what it accepts."""

    plain: bool  # the host knows every length, and no row has drafts: a step like any other
    slots: np.ndarray  # int32 [width]; 0: the line is no row of this step
    depths: np.ndarray  # int32 [width]
    least: np.ndarray  # int32 [width]: tokens that the row holds at least
    lengths: mx.array  # int32 [width]: as the device has them
    drafts: mx.array  # int32 [width, depth]; NONE where there is none
    logits: mx.array  # [width, 1 + depth, vocab]
    hidden: list[mx.array]  # [width, 1 + depth, hidden]: what these are made of, if known


class DraftRows(DecodeRows):
    def __init__(
        self,
        layout: Layout,
        layers: Sequence[ReplayedDeltaNet],
        future_map: FutureMap[mx.array],
        max_depth: int,
        paths: AttentionPaths,
    ) -> None:
        """`layers`: of the states, in the layout's order; `paths`: of rows that lie packed."""
        self._layers = layers
        self._future_map = future_map
        self._bounds: dict[int, Bound] = {}  # by slot
        super().__init__(layout, paths, max_depth=max_depth)

    @property
    def states(self) -> dict[int, list[mx.array]]:
        """Behind the input token of each row's last step."""
        caches = self.layout.caches
        held = self._per_row.states.items()
        return {cache: entries[: len(caches[cache].shapes)] for cache, entries in held}

    # ---- joining and leaving ---------------------------------------------------------------

    def join(
        self,
        joining: Sequence[tuple[int, PromptState]],
        prompts: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        super().join(joining, prompts)
        self._bounds |= {slot: Bound() for slot, _ in joining}

    def leave(self, slot: int) -> None:
        del self._bounds[slot]
        super().leave(slot)

    def held_at(self, slot: int, length: int, start: int) -> PromptState:
        """What a row holds of tokens [start, length); it may hold accepted drafts behind them."""
        self._settle(slot, length)
        return PromptState(length, self.kv_of(slot, start), self._states_at(slot, length))

    def _states_at(self, slot: int, length: int) -> dict[int, list[mx.array]]:
        held = self.states_of(slot)
        caches = self.layout.caches
        if not self._bounds[slot].kept:
            return {index: entries[: len(caches[index].shapes)] for index, entries in held.items()}
        future = self._future_map
        written_at = future.lengths[slot : slot + 1] - future.counts[slot : slot + 1]
        layers = zip(self._layers, held.items(), strict=True)
        return {index: layer.folded(kept, length - written_at) for layer, (index, kept) in layers}

    def num_unsure(self, slot: int) -> int:
        """Tokens by which the row may be shorter than the host knows."""
        return self._bounds[slot].num_unsure

    # ---- lengths ---------------------------------------------------------------------------

    def note_accepted(self, slot: int, part: Unsure, num_accepted: int) -> None:
        """Known now, unless rows were moved since, or the slot has another row."""
        bound = self._bounds.get(slot)
        if bound is not None and part in bound.unsure:
            bound.unsure.remove(part)
            bound.num_accepted = num_accepted if bound.kept else 0
            self.rows[slot].length -= part.depth - num_accepted

    def _settle(self, slot: int, length: int) -> None:
        """The row's length is known."""
        self.rows[slot].length = length
        self._bounds[slot].unsure.clear()

    def flush(self) -> None:
        unsure = {slot: bound for slot, bound in self._bounds.items() if bound.unsure}
        if unsure:
            future = self._future_map
            lengths, counts = np.asarray(future.lengths), np.asarray(future.counts)  # waits
            for slot, bound in unsure.items():
                bound.num_accepted = int(counts[slot])
                self._settle(slot, int(lengths[slot]))
        super().flush()

    # ---- one step --------------------------------------------------------------------------

    def verify(
        self, decodes: Sequence[DecodeRow], forward: Callable[[StepShape, Tree], StepResult]
    ) -> tuple[VerifyStep, dict[int, Unsure]]:
        """Run the input tokens of exactly these rows, and drafts behind them."""
        by_slot = {decode.slot: decode for decode in decodes}
        self._make_room({decode.slot: 1 + decode.depth for decode in decodes})
        slots, depths, counts, ends, unsure_slots = (
            np.zeros(self.width, dtype=np.int32) for _ in range(5)
        )
        least = self._blank_lengths()
        proposals: list[Proposal | None] = [None] * self.width
        unsure: dict[int, Unsure] = {}
        num_unsure, keeps, any_unsure = 0, False, False
        for row in self.rows.values():
            index, bound, decode = row.index, self._bounds[row.slot], by_slot.get(row.slot)
            self._park_or_resume(row, advances=decode is not None)
            ends[index], least[index] = row.num_main, row.length
            counts[index] = bound.num_accepted
            if bound.unsure:
                unsure_slots[index], any_unsure = row.slot, True
                least[index] -= bound.num_unsure
            if decode is None:
                continue
            slots[index], num_unsure = row.slot, max(num_unsure, row.length - int(least[index]))
            if decode.depth:
                depths[index], proposals[index] = decode.depth, decode.proposal
            row.length += 1 + decode.depth
            keeps |= bound.kept or decode.depth > 0
            bound.kept, bound.num_accepted = decode.depth > 0, 0
            if decode.depth:
                unsure[row.slot] = Unsure(decode.depth)
                bound.unsure.append(unsure[row.slot])
        unsure_at = mx.array(unsure_slots) if any_unsure else None
        lengths = _known(unsure_at, least, self._future_map.lengths)
        drafts = self._drafts(slots, depths, proposals, lengths)
        self._future_map.note_read(slots)
        tokens = self._future_map.tokens[send(slots)][:, None]
        if drafts.shape[1]:
            tokens = mx.concatenate([tokens, mx.maximum(drafts, 0)], axis=1)
        tree = {
            "tokens": tokens,
            "offset": lengths,
            "cursor": lengths - mx.array(ends) if any_unsure else mx.array(least - ends),
        }
        if keeps:
            tree["counts"] = _known(unsure_at, counts, self._future_map.counts)
        mains_shape, mains = self.mains.view(least, ends)
        logits, hidden = self._run(mains_shape, tree | mains, forward)
        plain = not unsure and not num_unsure
        facts = (plain, slots, depths, least, lengths, drafts)
        return VerifyStep(*facts, logits, hidden), unsure

    def _drafts(
        self,
        slots: np.ndarray,
        depths: np.ndarray,
        proposals: Sequence[Proposal | None],
        lengths: mx.array,
    ) -> mx.array:
        """int32 [width, the largest depth]"""
        depth = int(depths.max(initial=0))
        if not depth:
            return mx.zeros((self.width, 0), mx.int32)
        places = mx.arange(depth, dtype=mx.int32)[None]
        by_host = np.array([proposal is not None for proposal in proposals])
        if not by_host.any() and (depths[slots > 0] == depth).all():
            return self._left_drafts(slots, depths)
        drafts = Proposals.of(proposals).at(lengths[:, None] + 1 + places)
        own_depths = np.where(by_host, 0, depths)
        if own_depths.any():
            own = self._left_drafts(slots, own_depths)
            own = mx.pad(own, [(0, 0), (0, depth - own.shape[1])])
            drafts = mx.where(mx.array(by_host)[:, None], drafts, own)
        return mx.where(places < mx.array(depths)[:, None], drafts, NONE)

    def _left_drafts(self, slots: np.ndarray, depths: np.ndarray) -> mx.array:
        """int32 [width, the largest of `depths`], of the device's drafter."""
        for slot, depth in zip(slots.tolist(), depths.tolist(), strict=True):
            if slot and depth:
                self._future_map.note_drafts_read(slot, depth)
        return self._future_map.drafts[send(slots), : depths.max(initial=0)]

    def _run(
        self,
        mains_shape: PackedShape | None,
        tree: Tree,
        forward: Callable[[StepShape, Tree], StepResult],
    ) -> tuple[mx.array, list[mx.array]]:
        tree["tails"] = self._tails()
        keeps, before = "counts" in tree, self._per_row.states if "counts" in tree else self.states
        tree["states"] = [before[cache] for cache in self.layout.state_indices]
        drafts = DraftsShape(tree["tokens"].shape[1], keeps)
        shape = StepShape(self.width, mains_shape, drafts)
        logits, tails, states, hidden = forward(shape, tree)
        if not keeps:  # a step like any other: what is kept has no meaning, but its place
            held = zip(self.layout.state_indices, states, strict=True)
            states = [[*s, *self._per_row.states[cache][len(s) :]] for cache, s in held]
        self._per_row.take_over(tails, states)
        return logits, hidden


def find_draft_layers(
    model: Module, layout: Layout, *, deterministic: bool
) -> list[ReplayedDeltaNet] | str:
    """Of the states, in the layout's order; or why rows of this model can verify no drafts here."""
    if deterministic:
        return NOT_DETERMINISTIC
    if not layout.packs:
        return "an attention layer keeps latents, attends in its own way, or has a window in chunks"
    states = [layout.caches[index].layer for index in layout.state_indices]
    layers = delta_layers(model, states)
    return "a recurrent layer is not as Qwen3.5 has it" if layers is None else layers


def _known(unsure_at: mx.array | None, held: np.ndarray, by_slot: mx.array) -> mx.array:
    """int32 [width]: as the host has them, but those of slots that are unsure (0: it is not)."""
    if unsure_at is None:
        return mx.array(held)
    return mx.where(unsure_at == 0, mx.array(held), by_slot[unsure_at])


PADDING = SampleRow(0, 0)


class Verifier:
    def __init__(self, slots: SlotTable[mx.array], future_map: FutureMap[mx.array]) -> None:
        self._slots = slots
        self._future_map = future_map
        self._num_accepted = mx.compile(num_accepted) if future_map.drafts.size else num_accepted

    def verify(
        self,
        step: MLXPending,
        rows: DraftRows,
        decodes: Sequence[DecodeRow],
        ran: VerifyStep,
        unsure: Mapping[int, Unsure],
    ) -> tuple[mx.array | None, mx.array]:
        """Sample rows without a mask.

        int32 [width, tokens], if any was sampled, and [width]: how many drafts were accepted.
        """
        by_slot = {decode.slot: decode for decode in decodes}
        places = [None if not slot else by_slot[slot] for slot in ran.slots.tolist()]
        lines = self._sampled_lines(ran, places)
        tokens = self._sample(step, ran, lines) if any(row.slot for row in lines) else None
        counts = mx.zeros_like(ran.lengths)
        if tokens is not None and ran.drafts.shape[1]:
            stop_ids = mx.array(self._slots.stop_ids[ran.slots])
            counts = self._num_accepted(tokens, ran.drafts, stop_ids)
        is_row = mx.array(ran.slots > 0)  # padding holds nothing
        lengths = (ran.lengths + 1 + counts) * is_row
        self._future_map.stash_lengths(send(ran.slots), lengths, counts * is_row)
        if tokens is not None:
            self._read(step, rows, ran, lines, tokens, counts, unsure)
        step.written += [*self._future_map.arrays(), counts]
        return tokens, counts

    def _sampled_lines(
        self, ran: VerifyStep, places: Sequence[DecodeRow | None]
    ) -> list[SampleRow]:
        """Of each row, its input token and its drafts; PADDING where nothing is sampled."""
        lines = [PADDING] * (len(places) * ran.logits.shape[1])
        for place, decode in enumerate(places):
            if decode is not None and decode.samples and not decode.masked:
                for behind in range(1 + decode.depth):
                    row = self._row(decode.slot, int(ran.least[place]), behind)
                    lines[place * ran.logits.shape[1] + behind] = row
        return lines

    def _row(self, slot: int, length: int, behind: int) -> SampleRow:
        return SampleRow(slot, length + 1 + behind - int(self._slots.prompt_lens[slot]))

    def _sample(self, step: MLXPending, ran: VerifyStep, lines: Sequence[SampleRow]) -> mx.array:
        """int32 [width, tokens]"""
        width, num_tokens, vocab_size = ran.logits.shape
        logits = ran.logits.reshape(-1, vocab_size)
        words = noise_words(self._slots, ran.slots, ran.lengths + 1, num_tokens)
        keys = words.reshape(-1, 2)
        chosen = [number for number, row in enumerate(lines) if row.slot]
        if len(chosen) > len(lines) // 2:  # nothing is copied
            sampled = self._slots.sampler.sample(logits, lines, keys=keys)
            tokens = sampled.tokens
        else:
            at = mx.array(chosen)
            rows = [lines[number] for number in chosen]
            sampled = self._slots.sampler.sample(logits[at], rows, keys=keys[at])
            tokens = mx.zeros((len(lines),), mx.int32)
            tokens[at] = sampled.tokens
            lines = rows
        step.bring_logprobs([row.slot for row in lines], sampled)
        step.written += sampled.arrays
        return tokens.reshape(width, num_tokens)

    def _read(
        self,
        step: MLXPending,
        rows: DraftRows,
        ran: VerifyStep,
        lines: Sequence[SampleRow],
        tokens: mx.array,
        counts: mx.array,
        unsure: Mapping[int, Unsure],
    ) -> None:
        num_tokens = tokens.shape[1]
        slots = [row.slot for row in lines[::num_tokens]]
        last = mx.take_along_axis(tokens, counts[:, None], axis=1)
        owners = np.array(slots, dtype=np.int32)
        self._future_map.stash(send(owners), last)
        self._future_map.note_written(owners)
        step.samples = True

        def read(tokens: np.ndarray, counts: np.ndarray) -> None:
            step.read_accepted(slots, tokens, counts)
            for slot, part in unsure.items():
                rows.note_accepted(slot, part, len(step.tokens[slot]) - 1)

        step.read_later(step.bring([tokens, counts]), read)


def num_accepted(tokens: mx.array, drafts: mx.array, stop_ids: mx.array) -> mx.array:
    """int32 [rows]: of drafts [rows, depth] those that equal what was sampled before them, tokens
    [rows, depth + 1]; none behind a stop id."""
    sampled = tokens[:, :-1]
    stops = (sampled[:, :, None] == stop_ids[:, None]).any(axis=-1)
    agrees = (sampled == drafts) & ~stops
    return mx.cumprod(agrees.astype(mx.int32), axis=1).sum(axis=1)
