"""`pippin doctor`: real checks on this machine, and an exit status that can fail."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest

from pippin import LLM, SamplingParams
from pippin.backends.host import host_memory_bytes
from pippin.backends.mlx import environment
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.operations.library import OperationsReport
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import load_backend
from pippin.errors import LoadError
from pippin.offline.offline_requests import Completion
from pippin.terminal import doctor
from pippin.terminal.doctor import Finding
from pippin.types import TokenLogprobs


def examine(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    def look() -> Iterator[Finding]:
        yield from findings

    monkeypatch.setattr(doctor, "_examinations", lambda config: iter([("looking", look)]))


@pytest.mark.slow
def test_the_fast_recurrence_agrees_with_the_plain_one_here() -> None:
    (finding,) = doctor._recurrence()
    assert finding.ok, finding.value


def test_a_recurrence_that_drifts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = doctor.gated_delta_chunked

    def drifting(*args: mx.array) -> tuple[mx.array, mx.array, list[mx.array]]:
        y, state, states = right(*args)
        return y + 1e-3, state, states

    monkeypatch.setattr(doctor, "gated_delta_chunked", drifting)
    (finding,) = doctor._recurrence()
    assert finding.ok is False


def findings_of(config: Config) -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor._model(config)}


def test_a_batch_equals_single_requests_on_the_fake_backend() -> None:
    findings = findings_of(Config(model=ModelConfig(backend="fake")))
    assert set(findings) == {"budget", "batched = alone"}
    assert findings["batched = alone"].ok, findings["batched = alone"].value


def completion(*tokens: int, second_best: int = 9, behind: float = 0.0) -> Completion:
    logprobs = [
        TokenLogprobs(-1.0, (token, second_best), (-1.0, -1.0 - behind)) for token in tokens
    ]
    return Completion([1], tokens=list(tokens), logprobs=logprobs)


class Replies:
    """Stands in for an LLM: what it says of all prompts together, and of each alone."""

    def __init__(self, together: Completion, alone: Completion) -> None:
        self._said = {len(doctor.PROMPTS): together, 1: alone}

    def generate(self, prompts: str | Sequence[str], _: SamplingParams) -> list[Completion]:
        num_prompts = 1 if isinstance(prompts, str) else len(prompts)
        return [self._said[num_prompts]] * num_prompts


@pytest.mark.parametrize(
    ("num_same", "other", "behind", "ok"),
    [
        (24, 9, 5.0, True),
        (20, 9, 0.001, True),  # level: may fall either way
        (20, 9, 0.01, False),
        (20, 8, 0.0, False),  # not among the likeliest
        (10, 9, 0.0, False),  # too little was compared
    ],
)
def test_replies_may_part_only_between_tokens_that_are_level(
    num_same: int, other: int, behind: float, ok: bool
) -> None:
    together = completion(*[1] * 24, behind=behind)
    alone = completion(*[1] * num_same, *[other] * (24 - num_same))
    replies = cast(LLM, Replies(together, alone))
    assert doctor._batch_equals_solo(replies, 2e-3).ok is ok


def test_the_status_is_1_only_if_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examine(monkeypatch, Finding("said", "x"), Finding("checked", "y", ok=True))
    assert doctor.run_doctor(Config(), as_json=False) == 0
    examine(monkeypatch, Finding("checked", "y", ok=False))
    assert doctor.run_doctor(Config(), as_json=False) == 1
    assert "✗" in capsys.readouterr().out


def test_json_holds_every_finding_and_nothing_else_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examine(monkeypatch, Finding("said", "x"), Finding("checked", "y", ok=True))
    doctor.run_doctor(Config(), as_json=True)
    said, checked = json.loads(capsys.readouterr().out)
    assert (said["name"], said["ok"], checked["ok"]) == ("said", None, True)


@pytest.mark.parametrize(("limit", "expected"), [("1048576\n", 1 << 20), ("max\n", None)])
def test_a_container_s_limit_bounds_the_memory(
    tmp_path: Path, limit: str, expected: int | None
) -> None:
    path = tmp_path / "memory.max"
    path.write_text(limit)
    unlimited = host_memory_bytes(path.with_name("absent"))
    assert host_memory_bytes(path) == (expected or unlimited)


@pytest.mark.slow
def test_the_model_is_loaded_once_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load = MLXBackend.load

    def counted(path: Path, **options: Any) -> MLXBackend:
        loads.append(options["dtype"])
        return load(path, **options)

    monkeypatch.setattr(MLXBackend, "load", counted)
    findings = findings_of(Config())
    assert loads == ["auto"]
    assert {"budget", "attention", "prefill recurrence", "decode recurrence"} <= set(findings)
    assert [name for name, found in findings.items() if found.ok is not None] == ["batched = alone"]
    assert findings["batched = alone"].ok, findings["batched = alone"].value
    tiny = Config(engine=EngineConfig(memory="1MB"))
    with pytest.raises(LoadError, match=r"of a budget of 1\.0 MB"):
        findings_of(tiny)


def test_operations_that_do_not_work_here_are_named() -> None:
    why = {"choose": "it crashed (SIGILL)"}
    both = list(doctor._operations(OperationsReport(Path("x.so"), left_out=why)))
    assert both[0].value.startswith("Pippin's, in C++")
    assert (both[1].name, both[1].ok) == ("operation choose", None)
    assert "it crashed (SIGILL)" in both[1].value
    (none,) = doctor._operations(OperationsReport(reason="no g++ on PATH"))
    assert none.value == "mlx's own: no g++ on PATH"


NAMES = (environment.TF32, environment.CUDA_GRAPHS, *environment.BUFFER_LIMITS)


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def settings() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.parametrize(
    "engine", [EngineConfig(), EngineConfig(deterministic=True), EngineConfig(buffer_limit=200)]
)
def test_checks_run_with_the_environment_of_serve(
    engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with what an engine with the same options sets before it loads a model."""
    config = Config(ModelConfig(backend="mlx"), engine)
    examine(monkeypatch, Finding("said", "x"))
    doctor.run_doctor(config, as_json=True)
    checked = settings()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(MLXBackend, "load", lambda *_, **__: None)
    load_backend(config, lambda _: None)
    assert checked == settings()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "on, the default of mlx, here and in pippin serve; --deterministic turns it off"),
        ("0", "off: MLX_ENABLE_TF32=0, here and in pippin serve"),
        ("1", "on: MLX_ENABLE_TF32=1, here and in pippin serve"),
    ],
)
@pytest.mark.usefixtures("nothing_set")
def test_the_report_says_whether_products_are_rounded(
    value: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv(environment.TF32, value)
    monkeypatch.setattr(doctor, "on_cpu", lambda: False)
    found = {finding.name: finding.value for finding in doctor._device()}
    assert found["TF32"] == said


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.parametrize(("error", "with_tf32", "ok"), [(1e-3, True, True), (1e-3, False, False)])
def test_what_tf32_rounds_is_no_failure_where_serve_rounds_it(
    error: float, with_tf32: bool, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "on_cpu", lambda: False)
    if not with_tf32:
        monkeypatch.setenv(environment.TF32, "0")
    monkeypatch.setattr(doctor, "_relative_error", lambda *_: error)
    (finding,) = doctor._recurrence()
    assert finding.ok is ok


@pytest.mark.parametrize(
    ("engine", "compiled", "said"),
    [
        (EngineConfig(), True, "compiled, as in pippin serve"),
        (EngineConfig(deterministic=True), False, "not compiled: --deterministic"),
    ],
)
def test_the_report_says_which_decode_steps_were_checked(
    engine: EngineConfig, compiled: bool, said: str
) -> None:
    assert doctor._steps(Config(engine=engine), compiled=compiled) == said
