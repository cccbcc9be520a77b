"""Whole runs of `pippin doctor` in this process, on backends that are here."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from test_doctor_report import validate

from pippin.backends.mlx.backend import MLXBackend
from pippin.config import BackendName, Config, EngineConfig, ModelConfig
from pippin.terminal import doctor
from pippin.terminal.doctor import engine as replies
from pippin.terminal.doctor import on_mlx


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the smallest of the decode steps is timed, operations are not tried again, and replies
    are few and short."""
    monkeypatch.setattr(replies, "PROMPTS", replies.PROMPTS[:2])
    monkeypatch.setattr(replies, "REPLY_TOKENS", 6)
    monkeypatch.setattr(replies, "PARAMS", dataclasses.replace(replies.PARAMS, max_tokens=6))
    monkeypatch.setattr(doctor, "LIMIT_SECONDS", 0.0)
    monkeypatch.setattr(on_mlx, "try_operations", lambda _: {})


def report(
    capsys: pytest.CaptureFixture[str],
    backend: BackendName,
    engine: EngineConfig | None = None,
    *,
    status: int = 0,
) -> dict[str, dict[str, Any]]:
    """Findings by name, of each section by name."""
    config = Config(ModelConfig(backend=backend, dtype="float32"), engine or EngineConfig())
    found = doctor.run_doctor(config, as_json=True)
    printed = capsys.readouterr().out
    assert found == status, printed
    document = json.loads(printed)
    validate(document)
    return {
        section["name"]: {finding["name"]: finding for finding in section["findings"]}
        for section in document["sections"]
    }


def test_the_fake_backend(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "fake")
    assert list(found) == ["machine", "model", "choices", "batch", "steps"]
    assert found["batch"]["batched = alone"]["level"] == "ok"


@pytest.mark.slow
def test_mlx_is_loaded_twice_and_never_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[bool] = []
    load = MLXBackend.load

    def counted(path: Path, **options: Any) -> MLXBackend:
        loads.append(options["safe"])
        logging.getLogger("pippin.backends").warning("rows are not packed: the kernel is off")
        return load(path, **options)

    monkeypatch.setattr(MLXBackend, "load", counted)
    found = report(capsys, "mlx")
    assert loads == [False, True]
    names = ["machine", "device", "launches", "kernels", "model", "choices", "batch", "steps"]
    assert list(found) == [*names, "plain", "drafts"]
    assert found["drafts"]["--speculate auto"]["value"] == "not timed: no time was left"
    assert {"attention", "decode steps", "type", "products"} <= set(found["choices"])
    assert set(found["steps"]["1 row"]["numbers"]) == {"64"}
    assert found["steps"]["16 rows"]["numbers"] == {}
    assert found["model"]["load warned"]["value"] == "rows are not packed: the kernel is off"
    assert found["plain"]["as served = --safe"]["level"] == "ok"


@pytest.mark.slow
def test_torch_with_safe(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    found = report(capsys, "torch", EngineConfig(safe=True))
    assert list(found) == ["machine", "device", "launches", "model", "choices", "batch", "steps"]
    assert "--safe" in found["choices"]["layers"]["value"]
    assert found["batch"]["batched = alone"]["level"] == "ok"


def test_a_model_that_does_not_fit_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "mlx", EngineConfig(memory="1MB"), status=1)
    assert list(found)[-1] == "model"
    assert "of a budget of 1.0 MB" in found["model"]["model"]["value"]


def test_a_model_that_is_not_there_is_a_finding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = Config(ModelConfig(str(tmp_path / "absent")))
    assert doctor.run_doctor(config, as_json=False) == 1
    assert "absent" in capsys.readouterr().out
