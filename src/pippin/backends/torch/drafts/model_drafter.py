"""Drafts by a second, smaller model of the same tokenizer. Knows no plans and no sampling.

It reads tokens alone, so of an entry its hidden vector is not used. Of each slot it keeps keys of
the last tokens, and of the first ones that it was fed: models without a window attend to those
whatever follows, and do badly without.

    place of a token    its position, less that of the first token that the slot was fed
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.step.draft_texts import LENGTH, NUM_FIRST
from pippin.backends.torch.drafts.entries import ChooseDrafts, Entered, Entries
from pippin.backends.torch.drafts.ring import DraftRing, ring_bytes
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, Mix

# What a model's head reads of tokens [n], mixed by the caller: [n, hidden].
RunLayers = Callable[[Decoder, torch.Tensor, Mix], torch.Tensor]


def run_plain(decoder: Decoder, tokens: torch.Tensor, mix: Mix) -> torch.Tensor:
    return decoder.norm(decoder.run(tokens, mix))


def attention_layers(decoder: Decoder) -> list[AttentionLayer]:
    mixers = [layer.mixer for layer in decoder.layers]
    return [mixer for mixer in mixers if isinstance(mixer, AttentionLayer)]


def model_ring_bytes(decoder: Decoder) -> int:
    """Of one slot."""
    return ring_bytes(attention_layers(decoder), LENGTH, decoder.dtype.itemsize)


class ModelDrafter:
    def __init__(
        self,
        decoder: Decoder,
        vocab_size: int,  # of the model that verifies
        num_slots: int,
        run_layers: RunLayers = run_plain,
        length: int = LENGTH,
    ) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._run_layers = run_layers
        mixers = attention_layers(decoder)
        mixing = [layer for layer in decoder.layers if layer.mixer is not None]
        assert len(mixing) == len(mixers), "a draft model has attention alone"
        self._numbers = {id(layer): number for number, layer in enumerate(mixing)}
        self.ring = DraftRing(
            mixers, num_slots, length, decoder.dtype, decoder.device, num_first=NUM_FIRST
        )
        self.most_places = len(mixers[0].rope.cos)
        self._firsts = torch.zeros(num_slots + 1, dtype=torch.int64, device=decoder.device)
        self.firsts = np.zeros(num_slots + 1, dtype=np.int64)  # on the host

    def start(self, slot: int, first: int) -> None:
        """A slot's text is fed from this position on."""
        self.ring.start(slot)
        self._firsts[slot] = self.firsts[slot] = first

    def feed(self, entries: Entries, bound: int | None = None) -> Entered:
        firsts = self._firsts[entries.owners]
        places = entries.positions.view(len(firsts), -1) + 1 - firsts[:, None]
        return Entered(self._run(entries, places, None if bound is None else bound + 1))

    def draft(
        self,
        last: Entered,
        slots: torch.Tensor,
        positions: torch.Tensor,
        num_drafts: int,
        choose: ChooseDrafts,
        bound: int | None = None,
    ) -> torch.Tensor:
        drafts: list[torch.Tensor] = []
        while True:
            token = choose(self._logits(last.x), positions + 2)
            drafts.append(token)
            if len(drafts) == num_drafts:
                return torch.stack(drafts, dim=1)
            positions = positions + 1
            most = None if bound is None else bound + len(drafts)
            last = self.feed(Entries(slots, slots, positions, token.long(), None), most)

    def _run(self, entries: Entries, places: torch.Tensor, bound: int | None) -> torch.Tensor:
        """[n, hidden]: what the model's head reads."""
        flat = places.flatten()
        # What lies before a slot's first token is no row's, and what lies behind the longest text
        # is never accepted.
        rotated, kept = flat.clamp(0, self.most_places - 1), flat.clamp_min(0)

        def mix(layer: DecoderLayer, normed: torch.Tensor) -> torch.Tensor:
            mixer, number = layer.mixer, self._numbers[id(layer)]
            assert isinstance(mixer, AttentionLayer)
            q, k, v, gate = mixer.project(normed, rotated)
            self.ring.write(number, entries.slots, kept, k, v)
            seen = self.ring.attend(number, q, entries.owners, places, mixer.scoring, bound)
            return mixer.finish(seen, gate)

        tokens = entries.tokens.clamp_max(self._decoder.embed.shape[0] - 1)
        return self._run_layers(self._decoder, tokens, mix)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab], of the ids that the model which verifies has."""
        logits = self._decoder.head(hidden)
        missing = self._vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
