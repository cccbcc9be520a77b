"""What a plan was told to capture is what it captures at most, in buffers as in payloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cases import cases
from pippin.backends.base import Admit, Capture, DecodeRow, PrefillRow, Retire, StepPlan
from pippin.backends.mlx.backend import MLXBackend
from pippin.types import SamplingParams
from reference import BUNDLED
from serving import active_bytes, make_prompt, served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("exact_bytes")]

KINDS = (BUNDLED, "qwen3_5", "mamba2", "falcon_h1", "gpt_oss", "gemma3", "llama")
SMALL_BUFFERS = 1 << 16  # what sampling keeps, and the rounding of many small allocations


def admit(slot: int, prompt: np.ndarray) -> Admit:
    return Admit(slot, SamplingParams(temperature=0.0), (), prompt, 0)


def plans(prompts: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """A ragged batch with checkpoints, a lone chunk, a decode checkpoint, and both ends."""
    first, second = prompts
    return [
        {
            "admit": (admit(1, first), admit(2, second)),
            "prefill": (
                PrefillRow(1, 0, first[:192], checkpoints=(64, 128, 192), captures=True),
                PrefillRow(2, 0, second[:180], checkpoints=(64,), captures=True),
            ),
        },
        {
            "prefill": (
                PrefillRow(1, 192, first[192:], True, checkpoints=(256, 320), captures=True),
            ),
        },
        {"prefill": (PrefillRow(2, 180, second[180:], True, captures=True),)},
        {"decode": (DecodeRow(1, 330, checkpoint=True), DecodeRow(2, 190))},
        {"retire": (Retire(1, 320, 331, captures=True), Retire(2, 0, 191, captures=True))},
    ]


def cut_at_checkpoints(fields: dict[str, Any]) -> dict[str, Any]:
    """The same for a model whose forwards give no states inside: only those at their ends."""
    rows = [
        PrefillRow(
            r.slot,
            r.start,
            r.tokens,
            r.samples,
            checkpoints=tuple(at for at in r.checkpoints if at == r.end),
            captures=r.captures,
        )
        for r in fields.get("prefill", ())
    ]
    return fields | {"prefill": tuple(rows)}


@cases("name", KINDS)
def test_captures_take_no_more_than_was_told(name: str) -> None:
    backend = MLXBackend(served(name), num_slots=2)
    prompts = [np.array(make_prompt(name, n, seed=n), np.int32) for n in (330, 190)]
    before = active_bytes()
    captures: list[Capture] = []
    told = 0
    for number, fields in enumerate(plans(prompts)):
        plan = StepPlan(
            number, **(fields if backend.spec.state_taps else cut_at_checkpoints(fields))
        )
        allowed = backend.transient_bytes(plan)
        new = backend.launch(plan).wait().captures
        assert sum(capture.nbytes for capture in new) <= allowed
        captures += new
        told += allowed
    held = active_bytes() - before  # both slots are empty again: captures and no more
    assert 0 < sum(capture.nbytes for capture in captures) <= told
    assert held <= told + SMALL_BUFFERS


@cases("name", KINDS)
def test_a_discarded_step_gives_back_what_it_captured(name: str) -> None:
    backend = MLXBackend(served(name), num_slots=2)
    prompt = np.array(make_prompt(name, 128, seed=1), np.int32)
    before = active_bytes()
    chunk = PrefillRow(1, 0, prompt, checkpoints=(128,), captures=True)
    step = backend.launch(StepPlan(0, admit=(admit(1, prompt),), prefill=(chunk,)))
    step.discard()
    backend.launch(StepPlan(1, retire=(Retire(1),))).wait()
    assert active_bytes() - before <= SMALL_BUFFERS
