"""`pippin doctor`: real checks on this machine, and an exit status that can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from pippin import doctor
from pippin.backends.mlx.device import host_memory_bytes
from pippin.config import Config, ModelConfig
from pippin.doctor import Finding


def examine(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    def look() -> Iterator[Finding]:
        yield from findings

    monkeypatch.setattr(doctor, "_examinations", lambda config: iter([("looking", look)]))


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


def test_a_batch_equals_single_requests_on_the_fake_backend() -> None:
    (finding,) = doctor._batch_equals_solo(Config(model=ModelConfig(backend="fake")))
    assert finding.ok, finding.value


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


def test_the_model_s_findings_are_said_and_fail_nothing() -> None:
    findings = {finding.name: finding for finding in doctor._model(Config())}
    assert {"attention", "prefill recurrence", "decode recurrence"} <= set(findings)
    assert all(finding.ok is None for finding in findings.values())
    assert not list(doctor._model(Config(model=ModelConfig(backend="fake"))))
