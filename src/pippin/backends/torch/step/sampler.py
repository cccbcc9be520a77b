"""The stages of sampling in torch operations. Knows no model, no text and no order of stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.masks import WORD_BITS
from pippin.backends.sampling.batches import BiasEdits, DrawGroup, PenaltyGroup, RowSubset, Send
from pippin.backends.sampling.noise import threefry
from pippin.backends.sampling.rules import FAR, Draw
from pippin.backends.sampling.sampler import (
    ANY_NUMBER,
    MAX_TOP_LOGPROBS,
    Logprobs,
    Sampler,
    SampleRow,
)
from pippin.backends.torch.step.filters import LeastInTopP, dropped_tokens, least_in_top_p


class TorchSampler(Sampler[torch.Tensor]):
    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        send: Send[torch.Tensor],
        in_top_p: LeastInTopP = least_in_top_p,
    ) -> None:
        super().__init__(vocab_size, num_slots)
        self._copy = send
        self._in_top_p = in_top_p

    def _send(self, array: np.ndarray) -> torch.Tensor:
        return self._copy(array)

    def _stack(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(rows))

    def _count_each(self, counts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """In place: steps run in the order of their launches."""
        return counts.scatter_add_(1, tokens.long()[:, None], torch.ones_like(counts[:, :1]))

    def _put(
        self, x: torch.Tensor, subset: RowSubset[torch.Tensor], part: torch.Tensor
    ) -> torch.Tensor:
        return part if subset.index is None else x.to(part.dtype).index_copy(0, subset.index, part)

    def _add_biases(self, x: torch.Tensor, edits: BiasEdits[torch.Tensor]) -> torch.Tensor:
        return x.float().index_put((edits.rows, edits.ids), edits.values, accumulate=True)

    def _penalise(
        self,
        x: torch.Tensor,
        in_prompt: torch.Tensor,
        counts: torch.Tensor,
        group: PenaltyGroup[torch.Tensor],
    ) -> torch.Tensor:
        x, written = x.float(), counts > 0
        if group.repetition is not None:
            factor = torch.where(in_prompt | written, group.repetition, 1.0)
            x = torch.where(x > 0, x / factor, x * factor)
        return x - group.frequency * counts - group.presence * written

    def _apply_masks(self, x: torch.Tensor, masks: np.ndarray) -> torch.Tensor:
        """-inf where a grammar forbids, below FAR."""
        bits = torch.arange(WORD_BITS, dtype=torch.int32, device=x.device)
        allowed = (self._send(masks)[:, :, None] >> bits & 1).bool().flatten(1)[:, : x.shape[-1]]
        return x.float().masked_fill(~allowed, -torch.inf)

    def draw_places(
        self,
        logits: torch.Tensor,  # [n, V]
        slots: Sequence[int],  # of each; their requests have neither penalties nor masks
        keys: torch.Tensor,  # int32 [n, 2]: where the device alone knows a token's number
    ) -> torch.Tensor:
        """int32 [n]"""
        batch = self._batch([SampleRow(slot, ANY_NUMBER) for slot in slots])
        x = self._process(logits, batch, None)
        tokens = torch.zeros(len(slots), dtype=torch.int32, device=logits.device)
        for group in batch.draws:
            part = self._choose_by(group.subset.take(x), group, group.subset.take(keys))
            tokens = self._put(tokens, group.subset, part)
        return tokens

    def _choose(
        self, x: torch.Tensor, group: DrawGroup[torch.Tensor], keys: np.ndarray
    ) -> torch.Tensor:
        return self._choose_by(x, group, self._send(np.ascontiguousarray(keys).view(np.int32)))

    def _choose_by(
        self, x: torch.Tensor, group: DrawGroup[torch.Tensor], keys: torch.Tensor
    ) -> torch.Tensor:
        if group.draw is not Draw.GREEDY:
            scaled = x.float() * group.inverse_temperature
            x = add_gumbel_noise(scaled, keys)
            dropped = dropped_tokens(scaled, group, self._in_top_p)
            if dropped is not None:
                x = x - dropped * FAR
        return x.argmax(dim=-1).int()

    def _token_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, k: int
    ) -> Logprobs[torch.Tensor]:
        return token_logprobs(logits, tokens, k)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> Logprobs[torch.Tensor]:
    """Of `tokens` [n] and of the k likeliest tokens, under log_softmax of logits [n, V]."""
    x = logits.float()
    normaliser = torch.logsumexp(x, dim=-1, keepdim=True)
    chosen = x.gather(-1, tokens.long()[:, None]) - normaliser
    if k == 0:
        empty = x[:, :0]
        return Logprobs(chosen[:, 0], empty.long(), empty)
    # A fixed width, so that ties fall alike whatever others ask; sorted ids order them.
    width = min(max(k, MAX_TOP_LOGPROBS), x.shape[-1])
    ids = x.topk(width, dim=-1).indices.sort(dim=-1).values
    values = x.gather(-1, ids)
    order = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return Logprobs(chosen[:, 0], ids.gather(-1, order), values.gather(-1, order) - normaliser)


def add_gumbel_noise(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Logits, float32 [n, V], with the noise of the rows' keys, int32 [n, 2]."""
    return x - torch.log(exponential(random_bits(keys, x.shape[-1])))


def random_bits(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 [n, vocab_size]: the bits of unsigned numbers."""
    num_counters = (vocab_size + 1) // 2
    j = torch.arange(num_counters, dtype=torch.int32, device=keys.device)
    words = threefry(keys[:, :1], keys[:, 1:], j, j + num_counters, _rotated)
    return torch.cat(words, dim=-1)[:, :vocab_size]


def _rotated(words: torch.Tensor, by: int) -> torch.Tensor:
    high = (words >> (32 - by)) & ((1 << by) - 1)
    return (words << by) | high


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """float32, always positive and finite."""
    coarse = 1.0 - ((bits >> 9) & 0x7FFFFF).float() * 2.0**-23
    fine = (512 - (bits & 511)).float() * 2.0**-32
    return fine - torch.log(coarse)
