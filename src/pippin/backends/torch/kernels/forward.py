"""A step out of kernels: decode rows, rows that verify drafts, and chunks of prompts, in any mix.

Few launches, no host, shapes that depend on the step's size alone: whatever depends on its rows is
looked up in its words, on the device, and no row sees the tokens that are padding. Products are of
all tokens, so that weights are read once; a few rows take products of our own, with norms and sums
inside; what mixes tokens is the operations that each kind of layer has here. Rows that decode and
chunks share a forward where no layer is recurrent: with some it was slower than two forwards.

A token of a row and each of its drafts are rows to the products and to attention, which finds their
keys in the cells: these are written first. Equal to `PlainForward` but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.drafts.drafters import Entries, StepDrafter
from pippin.backends.torch.graphs.steps import Forwarded
from pippin.backends.torch.kernels.attention.blocks import attend_blocks
from pippin.backends.torch.kernels.attention.step import (
    attention_step,
    latent_step,
    place_heads,
    place_keys,
)
from pippin.backends.torch.kernels.draw import choose
from pippin.backends.torch.kernels.epilogues import ConvStep
from pippin.backends.torch.kernels.layers import first_of, most_fused, run_fused, run_layers
from pippin.backends.torch.kernels.packed.products import by_kernels, look_up_packed
from pippin.backends.torch.kernels.places import accept, expand
from pippin.backends.torch.kernels.products import product
from pippin.backends.torch.kernels.recurrent.convolution import conv_rows, keep_inputs
from pippin.backends.torch.kernels.recurrent.delta import (
    conv_step,
    conv_verify,
    delta_step,
    delta_verify,
)
from pippin.backends.torch.kernels.recurrent.delta_blocks import delta_blocks
from pippin.backends.torch.kernels.recurrent.mamba import mamba_blocks, mamba_step
from pippin.backends.torch.kernels.rows import gated_norm, look_up, norm_rows
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, RecurrentLayer
from pippin.backends.torch.models.mixers import (
    AttentionLayer,
    ConvLayer,
    DeltaLayer,
    LatentLayer,
    MambaLayer,
    Scoring,
)
from pippin.backends.torch.plain.forward import noise_words
from pippin.backends.torch.plain.recurrent import convolve_step
from pippin.backends.torch.pools.memory import KeptInputs, Pools
from pippin.backends.torch.step.decode_inputs import FIELDS, KEYS, Choice, Inputs
from pippin.backends.torch.step.words import Places, StepInputs, StepSize


class KernelForward:
    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        table: torch.Tensor,  # int32 [slots, positions]
        future: FutureMap[torch.Tensor],
        kept: KeptInputs | None = None,  # of rows that verify drafts
        drafter: StepDrafter | None = None,
    ) -> None:
        self._decoder = by_kernels(decoder)
        self._pools = pools
        self._table = table
        self._future = future
        self._kept = kept
        self._drafter = drafter
        self._most_fused = most_fused(decoder)

    def run(self, size: StepSize, words: torch.Tensor) -> Forwarded:
        """words, int32: see `StepWords`."""
        decoder, inputs = self._decoder, StepInputs.of(words, size, self._pools.layout)
        run = _Run(self._pools, self._table, self._kept, inputs, Inputs(inputs.rows))
        embedded = []
        if size.span:
            waste_cell = self._pools.layout.waste_cell
            run.places = expand(inputs, self._future, self._table, waste_cell)
            run.rows = run.places.inputs
            embedded.append(decoder.embedded(run.places.tokens))
        elif size.num_rows:
            embedded.append(decoder.scaled(self._look_up(run.rows)))
        if size.num_tokens:
            embedded.append(decoder.embedded(inputs.token.long()))
        x = embedded[0] if len(embedded) == 1 else torch.cat(embedded)
        if not size.num_tokens and len(x) <= self._most_fused:
            return self._fused(x, run)
        hidden = run_layers(decoder, x, run.mix)
        if not size.num_tokens:
            return self._of_rows(hidden, run)
        of_rows, every = hidden[: size.num_placed], hidden[size.num_placed :]
        last = every[inputs.last.long()]
        if not size.num_rows:
            return Forwarded(decoder.head(last), inputs.samples, last, every)
        both = Inputs(torch.cat([run.rows.words, inputs.samples.words], dim=1))
        return Forwarded(decoder.head(torch.cat([of_rows, last])), both, last, every)

    def _look_up(self, rows: Inputs) -> torch.Tensor:
        """Embeddings of the rows' tokens. Their cells go into the table."""
        embed = self._decoder.embed
        look = look_up if isinstance(embed, torch.Tensor) else look_up_packed
        return look(embed, self._future.tokens, self._table, rows)

    def _fused(self, x: torch.Tensor, run: _Run) -> Forwarded:
        decoder = self._decoder
        alone = len(x) == 1 and run.places is None
        y = run_fused(decoder, x, run.mix_projected, run.conv_of if alone else lambda _: None)
        if alone:
            return Forwarded(product(y, decoder.head, norm=decoder.norm), run.rows)
        return self._of_rows(norm_rows(y, decoder.norm), run)

    def _of_rows(self, hidden: torch.Tensor, run: _Run) -> Forwarded:
        logits, places = self._decoder.head(hidden), run.places
        if places is None:
            return Forwarded(logits, run.rows)
        return Forwarded(logits, _unowned(run.rows.words), every=hidden, places=places)

    def choose(self, forwarded: Forwarded, choice: Choice) -> torch.Tensor:
        """int32 [2, rows and chunks]: tokens, if they are not left to the sampler, and whether
        logits are NaN. Of rows with drafts [3 + width, rows]: drafts that are accepted, the input
        token's position, whether logits are NaN, and what was drawn behind each token; what is
        drawn for rows that are left to the sampler does not count."""
        logits, inputs, tokens = forwarded.logits, forwarded.inputs, self._future.tokens
        if forwarded.places is None:
            return choose(logits, inputs, tokens, choice)
        choice = min(choice, Choice.TOP_P)
        found = accept(forwarded.places, choose(logits, inputs, tokens, choice), self._future)
        if self._drafter is not None:
            self._draft(self._drafter, forwarded, forwarded.places, found, choice)
        return found

    def _draft(
        self,
        drafter: StepDrafter,
        forwarded: Forwarded,
        places: Places,
        found: torch.Tensor,
        choice: Choice,
    ) -> None:
        """Behind what rows accepted: what was drawn behind each token is the next one."""
        step, size = places.step, places.step.size
        words, future = step.rows[: len(FIELDS)], self._future.tokens
        slots, counts = step.column("slot").long(), found[0].long()
        place = torch.arange(size.width, device=slots.device)
        is_fed = (place <= counts[:, None]) & (step.column("is_left") == 0)[:, None]
        owners = torch.where(is_fed, slots[:, None], 0)
        starts = places.starts.long()
        positions = (starts[:, None] + place).flatten()
        tokens = found[3:].T.flatten().long()
        entries = Entries(slots, owners.flatten(), positions, tokens, forwarded.every)
        entered = drafter.feed(entries)
        if not size.num_drafts:
            return
        low, high = words[KEYS].long()
        streams = (high << 32) | (low & 0xFFFFFFFF)
        prompt_lens = step.column("prompt_len")

        def choose_drafts(logits: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
            keyed = _unowned(words)
            keyed.words[KEYS] = noise_words(streams, of_tokens - prompt_lens).T
            return choose(logits, keyed, future, choice)[0]

        last = torch.arange(size.num_rows, device=slots.device) * size.width + counts
        ends = starts + counts
        drafts = drafter.draft(entered.at(last), slots, ends, size.num_drafts, choose_drafts)
        self._future.stash_drafts(slots, drafts)


def _unowned(words: torch.Tensor) -> Inputs:
    """A copy, with padding's slot: what is drawn goes to no row's."""
    return Inputs(torch.cat([torch.zeros_like(words[:1]), words[1:]]))


@dataclass
class _Run:
    """One forward: tokens of rows, and behind them those of chunks."""

    pools: Pools
    table: torch.Tensor
    kept: KeptInputs | None
    chunks: StepInputs
    rows: Inputs  # of each of their tokens
    places: Places | None = None  # of rows that verify drafts
    convolved: set[int] = field(default_factory=set)  # layers, by the product before them

    def mix(self, layer: DecoderLayer, normed: torch.Tensor) -> torch.Tensor:
        mixer = layer.mixer
        assert mixer is not None
        return mixer.out(self.mix_projected(layer, first_of(mixer)(normed)))

    def mix_projected(self, layer: DecoderLayer, projected: torch.Tensor) -> torch.Tensor:
        """What the last product reads."""
        of_rows, of_chunks = OPERATIONS[type(layer.mixer)]
        size = self.chunks.size
        if not size.num_tokens:
            return of_rows(self, layer.mixer, layer.number, projected)
        if not size.num_rows:
            return of_chunks(self, layer.mixer, layer.number, projected)
        rows, chunks = projected[: size.num_placed], projected[size.num_placed :]
        found = of_rows(self, layer.mixer, layer.number, rows)
        return torch.cat([found, of_chunks(self, layer.mixer, layer.number, chunks)])

    def conv_of(self, layer: DecoderLayer) -> ConvStep | None:
        """The convolution of one row, as a part of the product before it."""
        mixer, rows = layer.mixer, self.rows
        if not isinstance(mixer, DeltaLayer):
            return None
        self.convolved.add(layer.number)
        return ConvStep(self.pools.conv[layer.number], mixer.taps, rows.state_in, rows.state_out)


def _attend_rows(
    run: _Run, mixer: AttentionLayer, number: int, projected: torch.Tensor
) -> torch.Tensor:
    projected, kv, rows = mixer.normed(projected), run.pools.kv[number], run.rows
    if run.places is not None:
        place_keys(projected, mixer, kv, rows.position, rows.cell)
    return attention_step(projected, mixer, kv, run.table, rows, early=run.places is None)


def _attend_chunks(
    run: _Run, mixer: AttentionLayer, number: int, projected: torch.Tensor
) -> torch.Tensor:
    qkv, kv, chunks = mixer.normed(projected), run.pools.kv[number], run.chunks
    q = place_heads(qkv, mixer, kv, chunks.position, chunks.cell)
    found = attend_blocks(q, kv, run.table, chunks.recurrent.blocks, mixer.scoring)
    return mixer.gated(found, mixer.gate_of(qkv))


def _attend_latents(
    run: _Run, mixer: LatentLayer, number: int, projected: torch.Tensor, *, chunks: bool
) -> torch.Tensor:
    tokens, shape = run.chunks if chunks else run.rows, mixer.shape
    q, cells = mixer.placed(projected, tokens.position.long())
    kept = run.pools.kv[number].flatten(1)
    kept[tokens.cell.long()] = cells
    absorbed = mixer.absorb(q).transpose(0, 1)
    if chunks:
        blocks, scoring = run.chunks.recurrent.blocks, Scoring(shape.scale)
        latents = attend_blocks(absorbed, kept, run.table, blocks, scoring, rank=shape.rank)
    else:
        latents = latent_step(absorbed, mixer, kept, run.table, run.rows)
    return mixer.values_of(latents.transpose(0, 1)).flatten(1)


def _delta_rows(run: _Run, mixer: DeltaLayer, number: int, projected: torch.Tensor) -> torch.Tensor:
    conv, recurrent, rows = run.pools.conv[number], run.pools.recurrent[number], run.rows
    if run.places is None:
        if number not in run.convolved:
            conv_step(projected, mixer, conv, rows.state_in, rows.state_out)
        return delta_step(projected, mixer, recurrent, rows.state_in, rows.state_out)
    assert run.kept is not None
    kept = run.kept.of_layer(number)
    mixed, replayed = conv_verify(projected, mixer, conv, kept, run.places)
    y = delta_verify(projected, mixed, replayed, mixer, recurrent, run.places)
    _, z, _ = mixer.split(projected)
    return gated_norm(y, z, mixer.norm)


def _mamba_rows(run: _Run, mixer: MambaLayer, number: int, projected: torch.Tensor) -> torch.Tensor:
    conv, state, rows = run.pools.conv[number], run.pools.recurrent[number], run.rows
    conv_step(projected, mixer, conv, rows.state_in, rows.state_out)
    return mamba_step(projected, mixer, state, rows.state_in, rows.state_out)


def _convolve_rows(
    run: _Run, mixer: ConvLayer, number: int, projected: torch.Tensor
) -> torch.Tensor:
    """In plain operations, of which a graph may be made."""
    conv, rows = run.pools.conv[number], run.rows
    mixed, gate, _ = mixer.split(projected)
    source = torch.cat([conv[rows.state_in.long()], mixed[:, None]], dim=1)
    conv[rows.state_out.long()] = source[:, 1:]
    return convolve_step(mixer, source) * gate


def _recur_chunks(
    run: _Run, mixer: RecurrentLayer, number: int, projected: torch.Tensor
) -> torch.Tensor:
    recurrent, conv = run.pools.recurrent[number], run.pools.conv[number]
    inputs = run.chunks.recurrent
    mixed, z, gates = mixer.split(projected)
    convolved = conv_rows(mixed, conv, mixer, inputs.places, inputs.states_in)
    keep_inputs(mixed, conv, inputs.blocks)
    if isinstance(mixer, ConvLayer):
        return convolved * z
    if isinstance(mixer, DeltaLayer):
        y = delta_blocks(convolved, gates, mixer, recurrent, inputs)
        return gated_norm(y, z, mixer.norm)
    y = mamba_blocks(convolved, gates, mixer, recurrent, inputs).flatten(1)
    groups = y.unflatten(1, (mixer.shape.num_groups, -1))
    return gated_norm(groups, z, mixer.norm, gate_first=True)


# Of each kind of layer: what mixes the tokens of rows, and those of chunks.
OPERATIONS: dict[type, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    AttentionLayer: (_attend_rows, _attend_chunks),
    LatentLayer: (partial(_attend_latents, chunks=False), partial(_attend_latents, chunks=True)),
    DeltaLayer: (_delta_rows, _recur_chunks),
    MambaLayer: (_mamba_rows, _recur_chunks),
    ConvLayer: (_convolve_rows, _recur_chunks),
}
