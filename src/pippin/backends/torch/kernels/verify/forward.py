"""A step that verifies drafts, out of kernels: padded to one depth, shapes that depend on its size.

A token of a row and each of its drafts are rows to the products and to attention, which finds their
keys in the cells: these are written first. Recurrent layers take a row's tokens one after the other
inside a kernel. Equal to `PlainVerify` but for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.drafts.drafters import Entries, StepDrafter
from pippin.backends.torch.kernels.attention.heads import place_keys
from pippin.backends.torch.kernels.attention.step import attention_step
from pippin.backends.torch.kernels.draw import choose
from pippin.backends.torch.kernels.layers import most_fused, run_fused, run_layers
from pippin.backends.torch.kernels.packed.linear import by_kernels
from pippin.backends.torch.kernels.rows import gated_norm, norm_rows
from pippin.backends.torch.kernels.verify.delta import conv_verify, delta_verify
from pippin.backends.torch.kernels.verify.places import accept, expand
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.plain.accept import noise_words
from pippin.backends.torch.pools.kept_inputs import KeptInputs
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.decode_inputs import FIELDS, KEYS, Choice, Inputs
from pippin.backends.torch.step.verify.words import Places, VerifySize


@dataclass(frozen=True)
class PlaceInputs(Inputs):
    """How the tokens sample; their slots are padding's, since no token goes to a slot at once."""

    places: Places
    hidden: torch.Tensor  # [tokens, hidden]: what the head read


class VerifyKernels:
    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        kept: KeptInputs,
        table: torch.Tensor,  # int32 [slots, positions]
        future: FutureMap[torch.Tensor],
        drafter: StepDrafter | None = None,
    ) -> None:
        self._decoder = by_kernels(decoder)
        self._pools = pools
        self._kept = kept
        self._table = table
        self._future = future
        self._drafter = drafter
        self._most_fused = most_fused(decoder)

    def logits(self, size: VerifySize, words: torch.Tensor) -> tuple[torch.Tensor, PlaceInputs]:
        """[tokens, vocab] of every row's input token and drafts."""
        waste_cell = self._pools.layout.waste_cell
        places = expand(size, words, self._future, self._table, waste_cell)
        x = self._decoder.embedded(places.tokens)
        if len(x) <= self._most_fused:
            y = run_fused(self._decoder, x, partial(self._mix_projected, places=places))
            hidden = norm_rows(y, self._decoder.norm)
        else:
            hidden = run_layers(self._decoder, x, partial(self._mix, places=places))
        logits = self._decoder.head(hidden)
        return logits, PlaceInputs(_unowned(places.inputs.words), places, hidden)

    def choose(
        self, logits: torch.Tensor, inputs: Inputs, future: torch.Tensor, choice: Choice
    ) -> torch.Tensor:
        """int32 [3 + width, rows]: drafts that are accepted, the input token's position, whether
        logits are NaN, and what was drawn behind each token. What is drawn for rows that are left
        to the sampler does not count."""
        assert isinstance(inputs, PlaceInputs)
        choice = min(choice, Choice.TOP_P)
        drawn = choose(logits, inputs, future, choice)
        found = accept(inputs.places, drawn, self._future)
        if self._drafter is not None:
            self._draft(self._drafter, inputs, found, choice)
        return found

    def _draft(
        self, drafter: StepDrafter, inputs: PlaceInputs, found: torch.Tensor, choice: Choice
    ) -> None:
        """Behind what rows accepted: what was drawn behind each token is the next one."""
        places, size = inputs.places, inputs.places.size
        words, future = places.rows[: len(FIELDS)], self._future.tokens
        slots, counts = places.column("slot").long(), found[0].long()
        place = torch.arange(size.width, device=slots.device)
        is_fed = (place <= counts[:, None]) & (places.column("is_left") == 0)[:, None]
        owners = torch.where(is_fed, slots[:, None], 0)
        starts = places.starts.long()
        positions = (starts[:, None] + place).flatten()
        tokens = found[3:].T.flatten().long()
        entered = drafter.feed(Entries(slots, owners.flatten(), positions, tokens, inputs.hidden))
        if not size.num_drafts:
            return
        low, high = words[KEYS].long()
        streams = (high << 32) | (low & 0xFFFFFFFF)
        prompt_lens = places.column("prompt_len")

        def choose_drafts(logits: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
            keyed = _unowned(words)
            keyed[KEYS] = noise_words(streams, of_tokens - prompt_lens).T
            return choose(logits, Inputs(keyed), future, choice)[0]

        last = torch.arange(size.num_rows, device=slots.device) * size.width + counts
        ends = starts + counts
        drafts = drafter.draft(entered.at(last), slots, ends, size.num_drafts, choose_drafts)
        self._future.stash_drafts(slots, drafts)

    def _mix(self, layer: DecoderLayer, normed: torch.Tensor, places: Places) -> torch.Tensor:
        mixer = layer.mixer
        if isinstance(mixer, AttentionLayer):
            return mixer.out(self._mix_projected(layer, mixer.qkv(normed), places))
        assert isinstance(mixer, DeltaLayer)
        return mixer.out(self._mix_projected(layer, mixer.project(normed), places))

    def _mix_projected(
        self, layer: DecoderLayer, projected: torch.Tensor, places: Places
    ) -> torch.Tensor:
        """What the last product reads."""
        mixer, number = layer.mixer, layer.number
        if isinstance(mixer, AttentionLayer):
            projected, kv = mixer.normed(projected), self._pools.kv[number]
            inputs = places.inputs
            place_keys(projected, mixer, kv, inputs.position, inputs.cell)
            return attention_step(projected, mixer, kv, self._table, inputs)
        assert isinstance(mixer, DeltaLayer)
        conv, recurrent = self._pools.conv[number], self._pools.recurrent[number]
        kept = self._kept.of_layer(number)
        mixed, replayed = conv_verify(projected, mixer, conv, kept, places)
        y = delta_verify(projected, mixed, replayed, mixer, recurrent, places)
        shape = mixer.shape
        z = projected[:, shape.num_channels : shape.num_channels + shape.num_v_heads * shape.v_dim]
        return gated_norm(y, z, mixer.norm)


def _unowned(words: torch.Tensor) -> torch.Tensor:
    """A copy, with padding's slot: what is drawn goes to no row's."""
    return torch.cat([torch.zeros_like(words[:1]), words[1:]])
