"""Kernels are held against plain operations at load; one that is wrong is named and not used.

Plain operations stand for kernels here, right ones and wrong ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from chunk_words import PlainPrompt
from pippin.backends.fallbacks import Fallbacks
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.kernels.checks import agreement
from pippin.backends.torch.kernels.checks.agreement import (
    ALL,
    NONE,
    Agreed,
    KernelSet,
    kernels_agree,
)
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.models.parts import ExpertMlp
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.plain.verify import PlainVerify
from pippin.backends.torch.pools.kept_inputs import KeptInputs
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.batches import Batch, HeldCells
from pippin.backends.torch.step.decode_inputs import FIELDS, Inputs
from pippin.backends.torch.step.filters import least_in_top_p
from pippin.backends.torch.step.verify.batch import SeenCells, VerifiedCells, VerifyBatch
from pippin.backends.torch.step.verify.words import FIRST_CELL, OWN_FIELDS, VerifySize
from pippin.backends.torch.streams import make_streams
from torch_serving import load_torch


class PlainSteps:
    """Reads nothing but the words of a step and the table, as kernels do."""

    def __init__(self, decoder: Decoder, pools: Pools, table: torch.Tensor) -> None:
        self.forward, self.table = PlainForward(decoder, pools), table

    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        slots, positions, cells = (x.long() for x in (inputs.slot, inputs.position, inputs.cell))
        self.table[slots, positions] = inputs.cell
        seen = tuple(
            self.table[slot, : position + 1].long()
            for slot, position in zip(slots.tolist(), positions.tolist(), strict=True)
        )
        batch = Batch(
            [1] * len(slots),
            tokens=future[slots].long(),
            positions=positions,
            states_in=inputs.state_in.long(),
            states_out=inputs.state_out.long(),
            held=HeldCells(cells, seen),
            windows=None,
        )
        return self.forward.decoder.head(self.forward.tokens(batch))


def plain_chunks(decoder: Decoder, pools: Pools, table: torch.Tensor) -> PlainForward:
    return PlainForward(decoder, pools)


def plain_experts(mlp: ExpertMlp, x: torch.Tensor) -> torch.Tensor:
    return mlp(x)


class PlainDrafts:
    """Reads nothing but the words of a step, the table and the future map, as kernels do."""

    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        kept: KeptInputs,
        table: torch.Tensor,
        future: FutureMap,
    ) -> None:
        self.decoder, self.table, self.future = decoder, table, future
        self.forward = PlainVerify(decoder, pools, kept)

    def logits(self, size: VerifySize, words: torch.Tensor) -> tuple[torch.Tensor, Any]:
        batch = self.batch(size, words.long())
        found = self.decoder.head(self.forward.hidden(batch))
        return found.new_zeros(size.num_tokens, found.shape[1]).index_copy(
            0, batch.places, found
        ), None

    def batch(self, size: VerifySize, words: torch.Tensor) -> VerifyBatch:
        names = (*FIELDS, *OWN_FIELDS)
        column = {name: words[number] for number, name in enumerate(names)}
        slots, starts, depths = (column[name] for name in ("slot", "position", "depth"))
        place = torch.arange(size.width)
        places = torch.nonzero((place <= depths[:, None]).flatten()).flatten()
        drafts = words[FIRST_CELL + size.span :][: size.depth].T
        tokens = torch.cat([self.future.tokens[slots, None].long(), drafts], dim=1)
        cells = words[FIRST_CELL : FIRST_CELL + size.width].T.flatten()[places]
        seen = [
            SeenCells(self.table[slot, : start + 1 + depth].long())
            for slot, start, depth in zip(
                *(x.tolist() for x in (slots, starts, depths)), strict=True
            )
        ]
        counts = torch.where(column["num_kept"] > 0, self.future.counts[slots].long(), 0)
        return VerifyBatch(
            lengths=(1 + depths).tolist(),
            width=size.width,
            slots=slots,
            starts=starts,
            drafts=drafts.int(),
            tokens=tokens.flatten()[places],
            positions=(starts[:, None] + place).flatten()[places],
            places=places,
            counts=counts,
            most_kept=int(column["num_kept"].max()),
            states_in=column["state_in"],
            states_out=column["state_out"],
            held=VerifiedCells(cells, tuple(seen)),
            windows=None,
        )

    def choose(self, *_: object) -> torch.Tensor:
        raise NotImplementedError


PLAIN = KernelSet(PlainSteps, plain_chunks, PlainPrompt, plain_experts, least_in_top_p, PlainDrafts)


@pytest.mark.parametrize("name", ["llama_biases", "qwen3_moe", "qwen3_5", "qwen3_5_moe"])
def test_kernels_that_are_right_are_used(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with torch.inference_mode():
        assert kernels_agree(load_torch(name).decoder, lambda: PLAIN, Fallbacks()) == ALL
    assert not caplog.records


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_a_half_precision_model_hold_numbers(
    dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its states are in float32, in the same memory: read as halves, their bits may be anything."""
    decoder = load_torch("qwen3_5", dtype=dtype).decoder
    with torch.inference_mode(), make_streams(decoder.device, decoder.dtype).forward():
        assert kernels_agree(decoder, lambda: PLAIN, Fallbacks()) == ALL
    assert not caplog.records


class WithoutResidual(PlainSteps):
    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        return super().logits(inputs, future) * 1.2


class OneRowIsRight(PlainSteps):
    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        found = super().logits(inputs, future)
        found[1:] = found[0]
        return found


class KeepsNothing(PlainSteps):
    """Logits are right, but what the next step reads is not."""

    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        found = super().logits(inputs, future)
        self.forward.pools.kv[0][inputs.cell.long()] = 0.0
        return found


class RunsNoKeptDrafts(PlainDrafts):
    def batch(self, size: VerifySize, words: torch.Tensor) -> VerifyBatch:
        found = super().batch(size, words)
        return replace(found, counts=torch.zeros_like(found.counts))


class KeepsNoDrafts(PlainDrafts):
    """Logits are right, but what the next step runs first is not."""

    def logits(self, size: VerifySize, words: torch.Tensor) -> tuple[torch.Tensor, Any]:
        kept = self.forward._kept.inputs
        before = kept.clone()
        found = super().logits(size, words)
        kept.copy_(before)
        return found


class NoNumbers(PlainForward):
    def __init__(self, decoder: Decoder, pools: Pools, table: torch.Tensor) -> None:
        super().__init__(decoder, pools)

    def chunks(self, batch: Any) -> torch.Tensor:
        return super().chunks(batch) * torch.nan


class KeepsNoTaps(PlainForward):
    """What is returned is right, and so are the states at the chunks' ends."""

    def __init__(self, decoder: Decoder, pools: Pools, table: torch.Tensor) -> None:
        super().__init__(decoder, pools)

    def chunks(self, batch: Any) -> torch.Tensor:
        found = super().chunks(batch)
        for tap in batch.taken.taps:
            self.pools.recurrent[0][tap.slab] = 0.0
        return found


class OtherTokens(PlainPrompt):
    def hidden(self, inputs: Any) -> torch.Tensor:
        inputs.token[0] += 1
        return super().hidden(inputs)


class Raises(PlainSteps):
    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")


def one_expert_less(mlp: ExpertMlp, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = mlp.route(x)
    weights[:, -1] = 0.0
    return mlp.run(x, weights, chosen)


def one_row_of_experts(mlp: ExpertMlp, x: torch.Tensor) -> torch.Tensor:
    found = mlp(x)
    found[-1] = 0.0
    return found


@pytest.mark.parametrize(
    ("where", "wrong", "named"),
    [
        ("all steps", {"steps": WithoutResidual}, "a decode step of 1 rows with attention"),
        ("all steps", {"steps": OneRowIsRight}, "a decode step of 3 rows with recurrent layers"),
        ("all steps", {"steps": KeepsNothing}, "a decode step of 1 rows with attention"),
        ("all steps", {"steps": Raises}, "shared memory"),
        ("all steps", {"experts": one_expert_less}, "experts"),
        ("all steps", {"experts": one_row_of_experts}, "experts"),
        ("all steps", {"in_top_p": lambda x, top_p, min_p: x.amax(dim=-1)}, "top_p"),
        ("prompts", {"chunks": NoNumbers}, "chunks of prompts with recurrent layers"),
        ("prompts", {"chunks": KeepsNoTaps}, "chunks of prompts with recurrent layers"),
        ("prompts", {"prompts": OtherTokens}, "captured chunks with attention"),
        ("steps with drafts", {"verify": RunsNoKeptDrafts}, "drafts of 1 rows with recurrent lay"),
        ("steps with drafts", {"verify": KeepsNoDrafts}, "drafts of 3 rows with recurrent layers"),
    ],
)
def test_a_kernel_that_is_wrong_is_named(
    where: str, wrong: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of prompts and of drafts leave the others."""
    decoder, fallbacks = load_torch("qwen3_5_moe").decoder, Fallbacks()
    with torch.inference_mode():
        agreed = kernels_agree(decoder, lambda: replace(PLAIN, **wrong), fallbacks)
    others = Agreed(True, where != "prompts", where == "prompts")
    assert agreed == (NONE if where == "all steps" else others)
    said = [record.getMessage() for record in caplog.records]
    assert said == [str(fallback) for fallback in fallbacks]
    assert all(line.startswith(f"plain operations are used for {where}: ") for line in said)
    assert any(named in line for line in said)
    if "experts" not in wrong:
        assert not any("experts" in line for line in said)


class RaisesAtMany(PlainSteps):
    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        if len(inputs.slot) >= 64:
            raise RuntimeError("out of resource: shared memory")
        return super().logits(inputs, future)


@pytest.mark.parametrize(("num_rows", "agreed"), [(48, ALL), (49, NONE), (64, NONE), (300, NONE)])
def test_kernels_are_tried_at_the_widths_that_will_run(num_rows: int, agreed: Agreed) -> None:
    decoder = load_torch("qwen3").decoder
    fallbacks, wrong = Fallbacks(), replace(PLAIN, steps=RaisesAtMany)
    with torch.inference_mode():
        assert kernels_agree(decoder, lambda: wrong, fallbacks, num_rows) == agreed
    named = [fallback.reason.startswith("a decode step of 64 rows") for fallback in fallbacks]
    assert named[:1] == [True] * (agreed is NONE)


def test_kernels_that_cannot_be_imported_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> KernelSet:
        raise ImportError("no triton")

    assert kernels_agree(load_torch("llama").decoder, make, Fallbacks()) == NONE
    assert "no triton" in caplog.text


def test_our_kernels_are_tried_on_a_loaded_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_torch("llama")
    wrong = replace(PLAIN, steps=WithoutResidual)
    monkeypatch.setattr(agreement, "our_kernels", lambda drafts: wrong)
    assert agreement.our_kernels_agree(loaded.decoder, loaded.max_len, 4, Fallbacks()) == NONE
    assert "a decode step of 1 rows with attention" in caplog.text
    monkeypatch.setattr(agreement, "our_kernels", lambda drafts: PLAIN)
    assert agreement.our_kernels_agree(loaded.decoder, loaded.max_len, 4, Fallbacks()) == ALL
