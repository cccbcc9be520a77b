"""Kernels against plain operations on this device, with this model's weights: in under a second.

One layer of each kind, the experts, and the choice of tokens. Imports no kernels: it is given them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from pippin.backends.torch.forward import ChunkForward, PlainForward
from pippin.backends.torch.kernels.checks.layers import (
    few_layers,
    noisy_chunks,
    noisy_step,
)
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.models.parts import ExpertMlp
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step import filters
from pippin.backends.torch.step.batches import chunk_batch, decode_batch
from pippin.backends.torch.step.chunk_inputs import ChunkInputs, pack_chunks
from pippin.backends.torch.step.decode_inputs import Inputs, pack_inputs
from pippin.backends.torch.step.filters import LeastInTopP
from pippin.backends.torch.step.sizes import Room

logger = logging.getLogger(__name__)

# Of the norm of a result. Rounding is a tenth of it, in sums of another order; another token, head
# or weight is all of it.
ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
NUM_TOKENS = (1, 5, 80)  # through experts
ROOM = Room(128, 4)


class StepKernels(Protocol):
    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor: ...


class PromptKernels(Protocol):
    def hidden(self, inputs: ChunkInputs) -> torch.Tensor: ...


@dataclass(frozen=True)
class KernelSet:
    steps: Callable[[Decoder, Pools, torch.Tensor], StepKernels]
    chunks: Callable[[Decoder, Pools], ChunkForward]
    prompts: Callable[[Decoder, Pools, torch.Tensor], PromptKernels]
    experts: Callable[[ExpertMlp, torch.Tensor], torch.Tensor]
    in_top_p: LeastInTopP


def kernels_agree(decoder: Decoder, make: Callable[[], KernelSet]) -> bool:
    """Whether all of them do; else a warning names those that do not, and why."""
    try:
        kernels = make()
        checks = list(_checks(decoder, kernels))
    except Exception as error:  # whatever a compiler or a driver says: plain operations serve
        logger.warning(
            "plain operations are used: kernels cannot be run: %s", error, exc_info=error
        )
        return False
    works = True
    for name, check in checks:
        try:
            off = check()
        except Exception as error:
            logger.warning("plain operations are used: %s: %s", name, error, exc_info=error)
            works = False
            continue
        if not off <= ROUNDING[decoder.dtype]:  # which is so too if it is no number
            logger.warning(
                "plain operations are used: the kernels of %s differ from them by %.1g here, and by"
                " %.1g at most they may",
                name,
                off,
                ROUNDING[decoder.dtype],
            )
            works = False
    return works


Check = tuple[str, Callable[[], float]]  # a name, and how far off it is


def _checks(decoder: Decoder, kernels: KernelSet) -> Iterator[Check]:
    for kind, alone in few_layers(decoder).items():
        for num_rows in (1, 3):
            name = f"a decode step of {num_rows} rows with {kind}"
            yield name, partial(_step_off, alone, num_rows, kernels)
        yield f"chunks of prompts with {kind}", partial(_chunks_off, alone, kernels)
        yield f"captured chunks with {kind}", partial(_prompts_off, alone, kernels)
    experts = (layer.mlp for layer in decoder.layers if isinstance(layer.mlp, ExpertMlp))
    if (mlp := next(experts, None)) is not None:
        for num_tokens in NUM_TOKENS:
            yield f"experts of {num_tokens} tokens", partial(_experts_off, mlp, num_tokens, kernels)
    yield "top_p", partial(_top_p_off, decoder, kernels)


def _step_off(decoder: Decoder, num_rows: int, kernels: KernelSet) -> float:
    step = noisy_step(decoder, num_rows)
    held, pools = step.held, step.held.pools
    cells, states = pools.index(step.arrays.cells), pools.index(step.arrays.states_out)
    tokens = pools.index(step.tokens)
    plain = PlainForward(decoder, pools)
    batch = decode_batch(step.arrays, tokens, held.rows, pools)
    expected = [plain.logits(plain.tokens(batch)), *held.written(cells, states)]
    pools.memory.copy_(step.before)
    words = pack_inputs(num_rows, step.arrays, pools.layout.waste_cell)
    future = torch.zeros(num_rows + 1, dtype=torch.int32, device=decoder.device)
    future[1:] = tokens
    run = kernels.steps(decoder, pools, held.rows.table)
    found = [run.logits(Inputs(torch.from_numpy(words).to(decoder.device)), future)]
    return _off([*found, *held.written(cells, states)], expected)


def _chunks_off(decoder: Decoder, kernels: KernelSet) -> float:
    chunks = noisy_chunks(decoder)
    held, pools = chunks.held, chunks.held.pools
    batch = chunk_batch(chunks.taken, held.rows, pools)
    found = []
    for forward in (kernels.chunks(decoder, pools), PlainForward(decoder, pools)):
        pools.memory.copy_(chunks.before)
        hidden = forward.chunks(batch)
        found.append([hidden, *held.written(batch.held.cells, batch.states_out)])
    return _off(*found)


def _prompts_off(decoder: Decoder, kernels: KernelSet) -> float:
    chunks = noisy_chunks(decoder)
    held, pools = chunks.held, chunks.held.pools
    batch = chunk_batch(chunks.taken, held.rows, pools)
    expected = [PlainForward(decoder, pools).chunks(batch)[batch.last]]
    expected += held.written(batch.held.cells, batch.states_out)
    pools.memory.copy_(chunks.before)
    packed = pack_chunks(ROOM, chunks.taken, held.rows, pools.layout)
    words = torch.from_numpy(packed.words).to(decoder.device)
    run = kernels.prompts(decoder, pools, held.rows.table)
    hidden = run.hidden(ChunkInputs(words, ROOM, packed.num_taps))[: len(chunks.taken.rows)]
    return _off([hidden, *held.written(batch.held.cells, batch.states_out)], expected)


def _experts_off(mlp: ExpertMlp, num_tokens: int, kernels: KernelSet) -> float:
    """Of tokens whose experts are clear: of equal shares any may be chosen."""
    weight = mlp.router.weight
    generator = torch.Generator(weight.device).manual_seed(num_tokens)
    x = torch.randn(num_tokens, weight.shape[1], generator=generator, device=weight.device)
    x = x.to(weight.dtype)
    num_chosen = mlp.shape.num_chosen
    is_clear = torch.ones(num_tokens, dtype=torch.bool, device=x.device)
    if num_chosen < mlp.shape.num_experts:
        shares = mlp.router(x).float().topk(num_chosen + 1, dim=-1).values
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
    """The worst of several results; NaN if one is no number."""
    each = [
        float((mine.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-20))
        for mine, theirs in zip(found, expected, strict=True)
    ]
    return float(np.max(each))
