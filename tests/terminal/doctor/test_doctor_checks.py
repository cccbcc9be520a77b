"""What `pippin doctor` checks: each check can fail, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import pytest

from pippin import LLM, SamplingParams
from pippin.backends.base import DeviceInfo
from pippin.backends.mlx import environment
from pippin.backends.mlx.cpu.operations import OperationsReport
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.offline.llm import Completion
from pippin.startup import resolve as measured_gain
from pippin.startup.resolve import Gain, resolve
from pippin.terminal.doctor import engine as replies
from pippin.terminal.doctor import on_mlx
from pippin.terminal.doctor.engine import Engine
from pippin.terminal.doctor.on_mlx import decode_steps, products
from pippin.types import TokenLogprobs


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is measured here decides for no other test."""
    monkeypatch.setattr(measured_gain, "user_cache_path", tmp_path.joinpath)


def test_recurrences_that_drift_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found.level for found in on_mlx.recurrence()] == ["ok", "ok"]
    right = on_mlx.gated_delta_step

    def drifting(*args: mx.array) -> tuple[mx.array, mx.array]:
        y, state = right(*args)
        return y + 1e-3, state

    monkeypatch.setattr(on_mlx, "gated_delta_step", drifting)
    assert [found.level for found in on_mlx.recurrence()] == ["ok", "wrong"]


@pytest.mark.parametrize(("error", "with_tf32", "level"), [(1e-3, True, "ok"), (1e-3, 0, "wrong")])
def test_what_tf32_rounds_is_no_failure_where_serve_rounds_it(
    error: float, with_tf32: bool, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_mlx, "on_cpu", lambda: False)
    monkeypatch.setenv(environment.TF32, "1" if with_tf32 else "0")
    monkeypatch.setattr(on_mlx, "relative_error", lambda *_: error)
    assert {found.level for found in on_mlx.recurrence()} == {level}


@pytest.mark.parametrize(("system", "level"), [("Linux", "warning"), ("Darwin", "info")])
def test_without_operations_the_report_says_why(
    system: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_mlx.platform, "system", lambda: system)
    found = on_mlx.operations(OperationsReport(reason="no g++ on PATH"))
    assert (found.value, found.level) == ("mlx's own: no g++ on PATH", level)
    assert ("apt install g++" in str(found.remedy)) == (level == "warning")
    assert "in C++" in on_mlx.operations(OperationsReport(module=object())).value


def completion(*tokens: int, second_best: int = 9, behind: float = 0.0) -> Completion:
    logprobs = [
        TokenLogprobs(-1.0, (token, second_best), (-1.0, -1.0 - behind)) for token in tokens
    ]
    return Completion([1], tokens=list(tokens), logprobs=logprobs)


@pytest.mark.parametrize(
    ("num_same", "other", "behind", "level"),
    [
        (24, 9, 5.0, "ok"),
        (20, 9, 0.001, "ok"),  # level: may fall either way
        (20, 9, 0.01, "wrong"),
        (20, 8, 0.0, "wrong"),  # not among the likeliest
        (10, 9, 0.0, "wrong"),  # too little was compared
    ],
)
def test_replies_may_part_only_between_tokens_that_are_level(
    num_same: int, other: int, behind: float, level: str
) -> None:
    first = completion(*[1] * 24, behind=behind)
    second = completion(*[1] * num_same, *[other] * (24 - num_same))
    found = replies.compared("x = y", [first] * 4, [second] * 4, 2e-3, means="different")
    assert found.level == level


def test_equal_tokens_with_other_probabilities_are_wrong() -> None:
    first, second = completion(*[1] * 24), completion(*[1] * 24)
    second.logprobs[3] = TokenLogprobs(-1.1, (1, 9), (-1.1, -2.0))
    found = replies.compared("x = y", [first] * 4, [second] * 4, 2e-3, means="different")
    assert (found.level, found.numbers["equal_tokens"]) == ("wrong", 96)


class TwoWays:
    """Stands in for an engine: what it replies as it is served, and with --safe."""

    margin = 2e-3

    def __init__(self, served: Completion, safe: Completion, *, is_plain: bool = False) -> None:
        self.is_plain = is_plain
        self.llm = cast(LLM, Replies(served))
        self._safe = Replies(safe)

    def safe(self) -> AbstractContextManager[Replies]:
        return nullcontext(self._safe)


class Replies:
    def __init__(self, each: Completion) -> None:
        self._each = each

    def generate(self, prompts: Sequence[str], _: SamplingParams) -> list[Completion]:
        return [self._each for _ in prompts]


def test_a_kernel_that_is_wrong_in_the_model_is_found_and_safe_is_recommended() -> None:
    right, wrong = completion(*[1] * 24, behind=3.0), completion(*[9] * 24)
    (found,) = replies.plain(cast(Engine, TwoWays(right, right)))
    assert found.level == "ok"
    (found,) = replies.plain(cast(Engine, TwoWays(right, wrong)))
    assert found.level == "wrong"
    assert "--safe" in str(found.remedy)
    (found,) = replies.plain(cast(Engine, TwoWays(right, wrong, is_plain=True)))
    assert found.level == "info"


def test_the_report_says_whose_products_a_model_has() -> None:
    class Stacked(nn.Linear):
        """As layers of one input are made over on GPUs."""

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), Stacked(64, 64))
    assert products(model) == "2 by mlx, 1 by mlx, one product for layers of one input"
    quantized = nn.Sequential(nn.Linear(64, 64).to_quantized(group_size=32))
    assert products(quantized) == "1 quantized, by mlx"
    assert products(nn.Sequential()) == "none"


@pytest.mark.parametrize(("off", "level"), [(1e-5, "ok"), (0.5, "wrong"), (None, "wrong")])
def test_each_kernel_of_torch_is_held_against_plain_operations(
    off: float | None, level: str
) -> None:
    pytest.importorskip("torch")
    from pippin.backends.torch.backend import TorchBackend
    from pippin.terminal.doctor.on_torch import choices

    class OnAGpu(TorchBackend):
        has_kernels, dtype = True, "bfloat16"
        device = DeviceInfo("cuda", "H200", 140 << 30, 0.85, prefill_tokens=8192)

        def __init__(self) -> None: ...

        def kernel_errors(self) -> Iterator[tuple[str, float | None, float]]:
            yield "chunks of prompts with attention", off, 0.1

    llm = SimpleNamespace(config=Config(), loop=SimpleNamespace(backend=OnAGpu()))
    *chosen, kernel = choices(cast(LLM, llm))
    assert chosen[0].value == "bfloat16: as the checkpoint is stored"
    assert chosen[1].value == "Triton kernels, captured as CUDA graphs"
    assert (kernel.name, kernel.level) == ("chunks of prompts with attention", level)
    assert level == "ok" or "--safe" in str(kernel.remedy)


@pytest.mark.parametrize(
    ("engine", "compiled", "said"),
    [
        (EngineConfig(), True, "compiled, as in pippin serve"),
        (EngineConfig(deterministic=True), False, "not compiled: --deterministic"),
        (EngineConfig(safe=True), False, "not compiled: --safe"),
    ],
)
def test_the_report_says_which_decode_steps_were_checked(
    engine: EngineConfig, compiled: bool, said: str
) -> None:
    assert decode_steps(Config(engine=engine), compiled=compiled) == said


@pytest.mark.parametrize(
    ("seconds", "wrong", "words", "level"),
    [
        ((2.0, 1.0), False, "2.00 times as fast, one request at a time, greedy: worth it", "ok"),
        ((1.0, 1.0), False, "1.00 times as fast, one request at a time, greedy: not worth", "ok"),
        ((2.0, 1.0), True, "2.00 times as fast", "wrong"),
    ],
)
def test_drafts_are_worth_what_they_were_timed_to_be(
    monkeypatch: pytest.MonkeyPatch,
    seconds: tuple[float, float],
    wrong: bool,
    words: str,
    level: str,
) -> None:
    def reply(llm: LLM, *, speculate: bool) -> tuple[float, list[int]]:
        return seconds[speculate], [1, 2 + (wrong and speculate)]

    monkeypatch.setattr(replies, "timed_reply", reply)
    engine = Engine(Config(ModelConfig(backend="fake")))
    _, not_changed = replies.drafts(engine)
    pays = seconds == (2.0, 1.0) and not wrong
    assert f"not changed: by this it would be {'auto' if pays else 'off'}" in not_changed.value
    assert resolve(Config(ModelConfig(backend="fake"))).engine.speculate == "off"
    found, default = replies.drafts(engine, saves=True)
    assert found.value.startswith(words)
    assert found.level == level
    expected = "`pippin serve` uses --speculate auto" if pays else "off: `pippin serve` has no"
    assert default.value.startswith(expected)
    assert resolve(Config(ModelConfig(backend="fake"))).engine.speculate == (
        "auto" if pays else "off"
    )


def test_a_gain_that_cannot_be_kept_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gain: Gain) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(replies, "keep_gain", fail)
    engine = Engine(Config(ModelConfig(backend="fake")))
    _, default = replies.drafts(engine, saves=True)
    assert (default.level, default.value) == ("warning", "not kept: read-only")


def test_a_gain_with_a_draft_model_is_of_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(Config(ModelConfig(backend="fake")))
    monkeypatch.setattr(Engine, "has_draft_model", True)
    (found,) = replies.drafts(engine)
    assert "with the draft model" in found.value
