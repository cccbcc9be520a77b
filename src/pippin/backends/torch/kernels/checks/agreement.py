"""Kernels against plain operations on this device, with this model's weights: in seconds.

One layer of each kind, the experts, and the choice of tokens. Knows no graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from pippin.backends.fallbacks import Fallbacks
from pippin.backends.torch.graphs.steps import DecodeForward, PromptForward
from pippin.backends.torch.kernels.checks.drafts import MAX_DEPTH, MakeVerify, noisy_drafts
from pippin.backends.torch.kernels.checks.layers import (
    NoisyRows,
    few_layers,
    noisy_chunks,
    noisy_step,
)
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.models.parts import ExpertMlp
from pippin.backends.torch.plain.forward import ChunkForward, PlainForward
from pippin.backends.torch.plain.verify import PlainVerify
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step import filters
from pippin.backends.torch.step.batches import Batch, ChunkBatch, chunk_batch, decode_batch
from pippin.backends.torch.step.chunk_inputs import ChunkInputs, pack_chunks
from pippin.backends.torch.step.decode_inputs import Inputs, pack_inputs
from pippin.backends.torch.step.filters import LeastInTopP
from pippin.backends.torch.step.sizes import Room, width_for
from pippin.backends.torch.step.verify.words import MOST_TOKENS
from pippin.types import GRID

logger = logging.getLogger(__name__)

# Of the norm of a result. Rounding is a tenth of it, in sums of another order; another token, head
# or weight is all of it.
ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
NUM_TOKENS = (1, 5, 80)  # through experts
ROOM = Room(128, 4)
WIDE = (8, 16, 32, 64, 128, 256)  # rows: tiles and kernels change with their number
MOST_ROWS = WIDE[-1]


@dataclass(frozen=True)
class KernelSet:
    steps: Callable[[Decoder, Pools, torch.Tensor], DecodeForward]
    chunks: Callable[[Decoder, Pools, torch.Tensor], ChunkForward]
    prompts: Callable[[Decoder, Pools, torch.Tensor], PromptForward]
    experts: Callable[[ExpertMlp, torch.Tensor], torch.Tensor]
    in_top_p: LeastInTopP
    verify: MakeVerify | None = None  # None: no drafts are verified


def our_kernels(drafts: bool = True) -> KernelSet:
    # Triton is not everywhere.
    from pippin.backends.torch.kernels.decode import DecodeKernels
    from pippin.backends.torch.kernels.layers import feed_forward
    from pippin.backends.torch.kernels.prompt import ChunkKernels, PromptKernels
    from pippin.backends.torch.kernels.top_p import least_in_top_p
    from pippin.backends.torch.kernels.verify.forward import VerifyKernels

    return KernelSet(
        DecodeKernels,
        ChunkKernels,
        PromptKernels,
        feed_forward,
        least_in_top_p,
        VerifyKernels if drafts else None,
    )


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
        return kernels_agree(decoder, partial(our_kernels, drafts), fallbacks, num_rows)


def kernels_agree(
    decoder: Decoder,
    make: Callable[[], KernelSet],
    fallbacks: Fallbacks,
    num_rows: int = MOST_ROWS,
) -> Agreed:
    """Those that do not are noted, and why."""
    agreed = ALL
    for check, off in _errors(decoder, make, num_rows):
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
    for check, off in _errors(decoder, partial(our_kernels, drafts), num_rows):
        if isinstance(off, Exception):
            logger.warning("%s: %s", check.name, off, exc_info=off)
        if chunks or check.kind != "prompts":
            yield check.name, None if isinstance(off, Exception) else off


def widths_to_check(most: int) -> list[int]:
    """Rows of the steps that will run, beside one and three: each kernel is compiled for these."""
    return [num_rows for num_rows in WIDE if num_rows <= width_for(most)]


class Check(NamedTuple):
    name: str
    kind: Literal["all steps", "prompts", "steps with drafts"] = "all steps"  # that need it


def _errors(
    decoder: Decoder, make: Callable[[], KernelSet], num_rows: int
) -> Iterator[tuple[Check, float | Exception]]:
    """How far off, or of any kind from a compiler or driver: plain operations serve."""
    try:
        kernels = make()
        checks = list(_checks(decoder, kernels, num_rows))
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
    decoder: Decoder, kernels: KernelSet, most: int
) -> Iterator[tuple[Check, Callable[[], float]]]:
    """With each, how far off it is."""
    for kind, alone in few_layers(decoder).items():
        for num_rows in (1, 3, *widths_to_check(most)):
            name = f"a decode step of {num_rows} rows with {kind}"
            yield Check(name), partial(_step_off, alone, num_rows, kernels)
            if kernels.verify is not None and num_rows * (1 + MAX_DEPTH) <= MOST_TOKENS:
                check = Check(f"drafts of {num_rows} rows with {kind}", "steps with drafts")
                yield check, partial(_drafts_off, alone, num_rows, kernels.verify)
        for name, off in (("chunks of prompts", _chunks_off), ("captured chunks", _prompts_off)):
            yield Check(f"{name} with {kind}", "prompts"), partial(off, alone, kernels)
    experts = (layer.mlp for layer in decoder.layers if isinstance(layer.mlp, ExpertMlp))
    if (mlp := next(experts, None)) is not None:
        for num_tokens in NUM_TOKENS:
            check = Check(f"experts of {num_tokens} tokens")
            yield check, partial(_experts_off, mlp, num_tokens, kernels)
    yield Check("top_p"), partial(_top_p_off, decoder, kernels)


def _step_off(decoder: Decoder, num_rows: int, kernels: KernelSet) -> float:
    held, arrays = noisy_step(decoder, num_rows)
    pools = held.pools
    tokens = pools.index((1 + np.arange(num_rows)) % decoder.shape.vocab_size)
    plain = PlainForward(decoder, pools)
    batch = decode_batch(arrays, tokens, held.rows, pools)
    words = pack_inputs(num_rows, arrays, pools.layout.waste_cell)
    inputs = Inputs(torch.from_numpy(words).to(decoder.device))
    future = torch.zeros(num_rows + 1, dtype=torch.int32, device=decoder.device)
    future[1:] = tokens
    run = kernels.steps(decoder, pools, held.rows.table)
    return _runs_off(
        held, batch, lambda: run.logits(inputs, future), lambda: decoder.head(plain.tokens(batch))
    )


def _drafts_off(decoder: Decoder, num_rows: int, verify: MakeVerify) -> float:
    """Of rows whose last drafts were kept, and run first."""
    drafts = noisy_drafts(decoder, num_rows)
    run = verify(decoder, drafts.pools, drafts.kept, drafts.held.rows.table, drafts.future)
    plain = PlainVerify(decoder, drafts.pools, drafts.kept)
    batch = drafts.batch
    found = drafts.found(lambda: run.logits(drafts.size, drafts.words)[0][batch.places])
    return _off(found, drafts.found(lambda: decoder.head(plain.hidden(batch))))


def _chunks_off(decoder: Decoder, kernels: KernelSet) -> float:
    held, taken = noisy_chunks(decoder)
    batch = chunk_batch(taken, held.rows, held.pools)
    run = kernels.chunks(decoder, held.pools, held.rows.table)
    plain = PlainForward(decoder, held.pools)
    return _runs_off(held, batch, lambda: run.chunks(batch), lambda: plain.chunks(batch))


def _prompts_off(decoder: Decoder, kernels: KernelSet) -> float:
    held, taken = noisy_chunks(decoder)
    batch, layout = chunk_batch(taken, held.rows, held.pools), held.pools.layout
    words = torch.from_numpy(pack_chunks(ROOM, taken, held.rows, layout).words)
    inputs = ChunkInputs.of(words.to(decoder.device), ROOM, layout)
    run = kernels.prompts(decoder, held.pools, held.rows.table)
    plain = PlainForward(decoder, held.pools)
    return _runs_off(
        held,
        batch,
        lambda: run.hidden(inputs)[inputs.last[: len(taken.rows)].long()],
        lambda: plain.chunks(batch)[batch.last],
    )


def _runs_off(held: NoisyRows, batch: Batch, *runs: Callable[[], torch.Tensor]) -> float:
    """Of two: what they return, and what they leave in the pools."""
    before, states = held.pools.memory.clone(), batch.states_out
    if isinstance(batch, ChunkBatch):
        taps = np.array([tap.slab for tap in batch.taken.taps], dtype=np.int64)
        states = torch.cat([states, held.pools.index(taps)])
    found = []
    for run in runs:
        held.pools.memory.copy_(before)
        found.append([run(), *held.written(batch.held.cells, states)])
    return _off(*found)


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
