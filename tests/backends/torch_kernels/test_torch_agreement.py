"""Kernels are held against plain operations at load; one that is wrong is named and not used.

Plain operations stand for kernels here, right ones and wrong ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from chunk_words import PlainWords
from pippin.backends.fallbacks import Fallbacks
from pippin.backends.torch.graphs.steps import Forwarded
from pippin.backends.torch.kernels import checks
from pippin.backends.torch.kernels.checks import ALL, NONE, Agreed, KernelSet, kernels_agree
from pippin.backends.torch.models.parts import ExpertMlp
from pippin.backends.torch.step.batches import DecodeBatch
from pippin.backends.torch.step.filters import least_in_top_p
from pippin.backends.torch.step.words import StepInputs, StepSize
from pippin.backends.torch.streams import make_streams
from torch_serving import load_torch


def plain_experts(mlp: ExpertMlp, x: torch.Tensor) -> torch.Tensor:
    return mlp(x)


PLAIN = KernelSet(PlainWords, plain_experts, least_in_top_p)


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


class Steps(PlainWords):
    """Wrong where rows decode without drafts."""

    def run(self, size: StepSize, words: torch.Tensor) -> Forwarded:
        found = super().run(size, words)
        if size.num_tokens or size.span:
            return found
        return found._replace(
            logits=self.changed(found.logits, StepInputs.of(words, size, self.pools.layout))
        )

    def changed(self, logits: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        return logits


class WithoutResidual(Steps):
    def changed(self, logits: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        return logits * 1.2


class OneRowIsRight(Steps):
    def changed(self, logits: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        return logits[:1].expand_as(logits)


class KeepsNothing(Steps):
    """Logits are right, but what the next step reads is not."""

    def changed(self, logits: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        self.pools.kv[0][inputs.column("cell").long()] = 0.0
        return logits


class Raises(Steps):
    at_least = 1

    def changed(self, logits: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        if len(logits) >= self.at_least:
            raise RuntimeError("out of resource: shared memory")
        return logits


class RaisesAtMany(Raises):
    at_least = 64


class RunsNoKeptDrafts(PlainWords):
    def batch(self, inputs: StepInputs) -> DecodeBatch:
        found = super().batch(inputs)
        return replace(found, counts=torch.zeros_like(found.counts))


class KeepsNoDrafts(PlainWords):
    """Logits are right, but what the next step runs first is not."""

    def run(self, size: StepSize, words: torch.Tensor) -> Forwarded:
        assert self.forward.kept is not None
        kept = self.forward.kept.inputs
        before = kept.clone()
        found = super().run(size, words)
        kept.copy_(before)
        return found


class NoNumbers(PlainWords):
    def chunks(self, inputs: StepInputs) -> torch.Tensor:
        return super().chunks(inputs) * torch.nan


class KeepsNoTaps(PlainWords):
    """What is returned is right, and so are the states at the chunks' ends."""

    def chunks(self, inputs: StepInputs) -> torch.Tensor:
        found, blocks = super().chunks(inputs), inputs.recurrent.blocks
        if self.pools.recurrent:
            ends = (inputs.recurrent.first_block + inputs.recurrent.num_blocks - 1).tolist()
            for block, slab in enumerate(blocks.slab.tolist()):
                if slab and block not in ends:
                    self.pools.recurrent[0][slab] = 0.0
        return found


class OtherTokens(PlainWords):
    def chunks(self, inputs: StepInputs) -> torch.Tensor:
        inputs.token[0] += 1
        return super().chunks(inputs)


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
        ("all steps", {"forward": WithoutResidual}, "a decode step of 1 rows with attention"),
        ("all steps", {"forward": OneRowIsRight}, "a decode step of 3 rows with recurrent layers"),
        ("all steps", {"forward": KeepsNothing}, "a decode step of 1 rows with attention"),
        ("all steps", {"forward": Raises}, "shared memory"),
        ("all steps", {"experts": one_expert_less}, "experts"),
        ("all steps", {"experts": one_row_of_experts}, "experts"),
        ("all steps", {"in_top_p": lambda x, top_p, min_p: x.amax(dim=-1)}, "top_p"),
        ("prompts", {"forward": NoNumbers}, "chunks of prompts with recurrent layers"),
        ("prompts", {"forward": KeepsNoTaps}, "chunks of prompts with recurrent layers"),
        ("prompts", {"forward": OtherTokens}, "chunks of prompts with attention"),
        ("steps with drafts", {"forward": RunsNoKeptDrafts}, "drafts of 1 rows with recurrent lay"),
        ("steps with drafts", {"forward": KeepsNoDrafts}, "drafts of 3 rows with recurrent layers"),
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


@pytest.mark.parametrize(("num_rows", "agreed"), [(48, ALL), (49, NONE), (64, NONE), (300, NONE)])
def test_kernels_are_tried_at_the_widths_that_will_run(num_rows: int, agreed: Agreed) -> None:
    decoder = load_torch("qwen3").decoder
    fallbacks, wrong = Fallbacks(), replace(PLAIN, forward=RaisesAtMany)
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
    wrong = replace(PLAIN, forward=WithoutResidual)
    monkeypatch.setattr(checks, "our_kernels", lambda: wrong)
    assert checks.our_kernels_agree(loaded.decoder, loaded.max_len, 4, Fallbacks()) == NONE
    assert "a decode step of 1 rows with attention" in caplog.text
    monkeypatch.setattr(checks, "our_kernels", lambda: PLAIN)
    assert checks.our_kernels_agree(loaded.decoder, loaded.max_len, 4, Fallbacks()) == ALL
