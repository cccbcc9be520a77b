"""What the backend's own drafters read and return: an MTP head's, and a smaller model's.

    entry at position p     the hidden vector of token p, and token p + 1: drafts token p + 2

Shapes depend on the numbers of rows and of drafts alone, and nothing waits: a graph can hold it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.step.drafts import LENGTH, NUM_FIRST
from pippin.backends.torch.drafts.ring import DraftRing, ring_bytes
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, Mix
from pippin.backends.torch.models.mixers import AttentionLayer, MtpHead
from pippin.backends.torch.models.parts import Mlp, Norm

HEAD_LENGTH = 64  # tokens of a row whose keys an MTP head keeps

# Of logits [rows, vocab], and of the positions of the tokens that they are of: int32 [rows].
ChooseDrafts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerOperations:
    """Plain ones; on GPUs kernels stand in for them."""

    norm: Callable[[torch.Tensor, Norm], torch.Tensor] = lambda x, norm: norm(x)
    feed_forward: Callable[[Mlp, torch.Tensor], torch.Tensor] = lambda mlp, x: mlp(x)


PLAIN = LayerOperations()


class Entries(NamedTuple):
    """Of rows one after the other, each as many."""

    owners: torch.Tensor  # int64 [rows]: their slots
    slots: torch.Tensor  # int64 [n]; 0: it is not kept
    positions: torch.Tensor  # int64 [n]
    tokens: torch.Tensor  # int64 [n]: those behind
    hidden: torch.Tensor | None  # [n, hidden]; None: not known


class Entered(NamedTuple):
    """What a drafter has made of entries."""

    x: torch.Tensor  # [n, hidden]
    q: torch.Tensor | None = None  # [n, heads, channels]: of a layer that has not attended
    gate: torch.Tensor | None = None  # [n, heads * channels]

    def at(self, rows: torch.Tensor) -> Entered:
        q, gate = (None if part is None else part[rows] for part in (self.q, self.gate))
        return Entered(self.x[rows], q, gate)


class StepDrafter(ABC):
    ring: DraftRing

    def draft(
        self,
        last: Entered,  # of the entries that rows go on from
        slots: torch.Tensor,  # int64 [rows]
        positions: torch.Tensor,  # int64 [rows]: of these entries
        num_drafts: int,
        choose: ChooseDrafts,
        bound: int | None = None,  # of these positions; None: it is not known
    ) -> torch.Tensor:
        """int32 [rows, num_drafts]: tokens from two behind the entries on."""
        drafts: list[torch.Tensor] = []
        while True:
            hidden, logits = self._finish(last, slots, positions, bound)
            token = choose(logits, positions + 2)
            drafts.append(token)
            if len(drafts) == num_drafts:
                return torch.stack(drafts, dim=1)
            positions, bound = positions + 1, None if bound is None else bound + 1
            last = self.feed(Entries(slots, slots, positions, token.long(), hidden), bound)

    @abstractmethod
    def feed(self, entries: Entries, bound: int | None = None) -> Entered: ...

    @abstractmethod
    def _finish(
        self, entered: Entered, slots: torch.Tensor, positions: torch.Tensor, bound: int | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """[rows, hidden] of the next entries, if they have that, and logits [rows, vocab]."""


class MtpDrafter(StepDrafter):
    def __init__(
        self, decoder: Decoder, head: MtpHead, num_slots: int, operations: LayerOperations = PLAIN
    ) -> None:
        self._decoder = decoder
        self._head = head
        self.ring = DraftRing([head.mixer], num_slots, HEAD_LENGTH, decoder.dtype, decoder.device)
        self._norm = operations.norm
        self._feed_forward = operations.feed_forward
        self._last_position = len(head.mixer.rope.cos) - 1

    def feed(self, entries: Entries, bound: int | None = None) -> Entered:
        head = self._head
        assert entries.hidden is not None
        embedded = self._norm(self._decoder.embedded(entries.tokens), head.embed_norm)
        hidden = self._norm(entries.hidden, head.hidden_norm)
        x = head.fc(torch.cat([embedded, hidden], dim=-1))
        # Drafts may lie behind the longest text there is: they are never accepted.
        positions = entries.positions.clamp_max(self._last_position)
        q, k, v, gate = head.mixer.project(self._norm(x, head.input_norm), positions)
        self.ring.write(0, entries.slots, entries.positions, k, v)
        return Entered(x, q, gate)

    def _finish(
        self, entered: Entered, slots: torch.Tensor, positions: torch.Tensor, bound: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head, (x, q, gate) = self._head, entered
        assert q is not None
        places, scoring = positions[:, None], head.mixer.scoring
        x = x + head.mixer.finish(self.ring.attend(0, q, slots, places, scoring, bound), gate)
        x = x + self._feed_forward(head.mlp, self._norm(x, head.mlp_norm))
        hidden = self._norm(x, head.norm)
        return hidden, self._decoder.head(hidden)


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


class ModelDrafter(StepDrafter):
    """A smaller model of the same tokenizer: it reads tokens alone.

    Of each slot it keeps keys of the last tokens, and of the first ones that it was fed: models
    without a window attend to those whatever follows, and do badly without.

        place of a token    its position, less that of the first token that the slot was fed
    """

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

    def _finish(
        self, entered: Entered, slots: torch.Tensor, positions: torch.Tensor, bound: int | None
    ) -> tuple[None, torch.Tensor]:
        """Of the ids that the model which verifies has."""
        logits = self._decoder.head(entered.x)
        missing = self._vocab_size - logits.shape[-1]
        return None, F.pad(logits, (0, missing), value=-torch.inf) if missing else logits

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
