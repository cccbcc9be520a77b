"""`--safe`: plain operations of mlx or torch alone, and the same tokens as without it."""

from __future__ import annotations

import subprocess
from typing import Any

import mlx.core as mx
import pytest

from bundled import BUNDLED_PATH
from near_ties import ENOUGH, assert_same
from pippin import LLM, SamplingParams
from pippin.backends.mlx import load
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu import operations
from pippin.backends.mlx.rows import decode_forward
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import ConfigError
from pippin.offline.llm import Completion

pytestmark = pytest.mark.slow

# Rows of different lengths, one above a block of 64, two that share their beginning.
PROMPTS = (
    "Once",
    "The fox and the crow met",
    "The fox and the crow met in the wood",
    "Tom had a big dog. The dog liked to run and play in the park with " * 6,
)
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=4)
CONSTRAINED = SamplingParams(max_tokens=8, temperature=0.0, regex="(yes|no)")  # sampled late
DRAWN = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)


class Used(AssertionError):
    """Something that `--safe` may not use was used."""


def replies(*, safe: bool) -> tuple[list[Completion], list[Completion]]:
    """In float32: greedy ones, with what decides them, and drawn ones."""
    model = ModelConfig(model=str(BUNDLED_PATH), backend="mlx", dtype="float32")
    config = Config(model, EngineConfig(safe=safe, max_running=4, memory="2GB"))
    with LLM(config=config) as llm:
        assert llm.generate("Is it?", CONSTRAINED)[0].text in ("yes", "no")
        return llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, DRAWN)


def forbid_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is not mlx's own raises: our library, a compiler, a kernel, a compiled step."""

    def used(*args: Any, **options: Any) -> Any:
        raise Used(f"{args} {options}")

    monkeypatch.setattr(operations, "find_operations", Unloaded())
    monkeypatch.setattr(subprocess, "run", used)
    for name in ("metal_kernel", "cuda_kernel"):
        if hasattr(mx.fast, name):
            monkeypatch.setattr(mx.fast, name, used)
    monkeypatch.setattr(decode_forward.mx, "compile", used)


class Unloaded:
    def __call__(self) -> Any:
        raise Used("our operations")

    def cache_info(self) -> Any:
        return type("Info", (), {"currsize": 0})


def test_safe_uses_nothing_of_ours_and_replies_with_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, drawn_usual = replies(safe=False)
    forbid_ours(monkeypatch)
    safe, drawn_safe = replies(safe=True)
    assert_same(safe, usual)
    same = sum(a.tokens == b.tokens for a, b in zip(drawn_safe, drawn_usual, strict=True))
    assert same >= ENOUGH * len(PROMPTS)


def test_a_safe_engine_and_another_run_in_one_process() -> None:
    """What one is asked to leave alone, the other still has."""
    safe = MLXBackend.load(BUNDLED_PATH, num_slots=2, dtype="float32", safe=True)
    usual = MLXBackend.load(BUNDLED_PATH, num_slots=2, dtype="float32")
    assert not safe.steps_are_compiled
    with safe.loaded.operating():
        assert operations.operations() is None
    with usual.loaded.operating():
        assert operations.operations() is operations.find_operations().module


def test_safe_on_a_gpu_has_no_kernel_no_stacked_layers_and_nothing_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As far as a GPU can be stood for here: what is chosen there is not asked."""

    def used(*_: object, **__: object) -> Any:
        raise Used("chosen for GPUs")

    monkeypatch.setattr(load, "on_cpu", lambda: False)
    for name in ("_choose_attention", "_merge_linear_layers", "operations"):
        monkeypatch.setattr(load, name, used)
    loaded = load.load(BUNDLED_PATH, dtype="float32", safe=True)
    assert loaded.attention.kernel is None


def test_safe_torch_has_no_kernels_and_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from pippin.backends.torch import backend as torch_backend

    def used(*_: object) -> bool:
        raise Used("kernels")

    monkeypatch.setattr(torch_backend, "suit_kernels", used)
    load = torch_backend.TorchBackend.load
    assert load(BUNDLED_PATH, num_slots=2, dtype="float32", safe=True).shapes_to_warm_up == []


def test_safe_and_drafts_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="remove --speculate or --safe"):
        EngineConfig(safe=True, speculate="suffix")
