"""The report of `pippin doctor`: a page, a stable JSON document, an exit status; no user names."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pippin.backends.mlx.backend import MLXBackend
from pippin.config import BackendName, Config, EngineConfig, ModelConfig
from pippin.errors import ConfigError, LoadError
from pippin.terminal import doctor
from pippin.terminal.doctor import (
    SCHEMA,
    SCHEMA_VERSION,
    Examined,
    Finding,
    as_document,
    as_page,
    checked,
    on_mlx,
    private,
)
from pippin.terminal.doctor import engine as replies
from processes import environment

INFO = Finding("memory", "8 GB", numbers={"memory_bytes": 8e9})
RIGHT = Finding("product", "error 0", "ok")
SLOW = Finding("BLAS", "the slow one", "warning", "products are slow", "install another")
WRONG = Finding("attention", "error 1", "wrong", "replies are wrong", "serve with --safe")


def examine(monkeypatch: pytest.MonkeyPatch, *findings: Finding | Exception) -> None:
    def look() -> Iterator[Finding]:
        for finding in findings:
            if isinstance(finding, Exception):
                raise finding
            yield finding

    monkeypatch.setattr(
        doctor, "sections", lambda *_, **__: iter([doctor.Section("kernels", "looking", look)])
    )


def validate(document: Any) -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("findings", "status"), [((INFO, RIGHT), 0), ((RIGHT, SLOW), 0), ((RIGHT, WRONG), 1)]
)
def test_the_status_is_1_only_if_something_is_wrong(
    findings: tuple[Finding, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    examine(monkeypatch, *findings)
    assert doctor.run_doctor(Config(), as_json=True) == status
    printed = capsys.readouterr()
    document = json.loads(printed.out)  # nothing else is there
    validate(document)
    assert document["ok"] is (status == 0)
    assert "looking ..." in printed.err


def test_every_finding_is_on_the_page_with_what_it_means_and_what_to_do() -> None:
    page = as_page([Examined("kernels", 0.5, (INFO, RIGHT, SLOW, WRONG))], 1.0)
    assert "1 check failed, 1 warning, 1 check passed" in page.splitlines()[0]
    for finding in (INFO, RIGHT, SLOW, WRONG):
        assert f"{finding.name}: {finding.value}" in page
    for finding in (SLOW, WRONG):
        assert f"meaning: {finding.means}" in page
        assert f"what to do: {finding.remedy}" in page
    assert "all right" in as_page([Examined("kernels", 0.5, (INFO, RIGHT))], 1.0)


def test_the_schema_allows_what_is_written_and_nothing_else() -> None:
    document = as_document([Examined("kernels", 0.5, (INFO, RIGHT, SLOW, WRONG))], 1.0)
    validate(document)
    assert document["schema"] == SCHEMA_VERSION
    finding = ("sections", 0, "findings")
    for place, change in (
        ((), {"further": 1}),
        ((), {"schema": SCHEMA_VERSION + 1}),
        ((*finding, 3), {"remedy": None}),
        ((*finding, 1), {"means": "x"}),
        ((*finding, 0), {"level": "bad"}),
        ((*finding, 0), {"numbers": {"x": "1"}}),
        ((*finding, 0), {"name": ""}),
    ):
        changed = part = json.loads(json.dumps(document))
        for step in place:
            part = part[step]
        part.update(change)
        with pytest.raises(jsonschema.ValidationError):
            validate(changed)


def test_what_is_no_number_is_not_written_as_one() -> None:
    found = Finding("product", "error nan", "ok", numbers={"error": float("nan"), "limit": 0.5})
    document = as_document([Examined("kernels", 0.5, (found,))], 1.0)
    assert document["sections"][0]["findings"][0]["numbers"] == {"limit": 0.5}
    json.dumps(document, allow_nan=False)


def test_a_section_that_fails_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examine(monkeypatch, RIGHT, RuntimeError("no such kernel"))
    assert doctor.run_doctor(Config(), as_json=False) == 1
    printed = capsys.readouterr()
    assert "RuntimeError: no such kernel" in printed.out
    assert "--safe" in printed.out
    assert "Traceback" in printed.err
    examine(monkeypatch, LoadError("memory: the model uses 8 GB"))
    assert doctor.run_doctor(Config(), as_json=False) == 1
    assert "memory: the model uses 8 GB" in capsys.readouterr().out


def test_an_option_that_is_wrong_is_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    examine(monkeypatch, ConfigError("memory must be an amount"))
    with pytest.raises(ConfigError):
        doctor.run_doctor(Config(), as_json=False)


@pytest.mark.parametrize("words", [["--no-such-option"], ["--memory", "much"]])
def test_the_status_of_wrong_usage_is_2(words: list[str]) -> None:
    command = [sys.executable, "-m", "pippin", "doctor", *words]
    assert subprocess.run(command, env=environment(), capture_output=True).returncode == 2


def test_names_of_users_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/srv/homes/ada"))
    assert private("at /srv/homes/ada/.venv/bin/python") == "at ~/.venv/bin/python"
    assert private("/srv/homes/adam/x") == "/srv/homes/adam/x"
    assert private("in '/Users/ada/Library/x': /home/bob") == "in '~/Library/x': ~"
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert private("/usr/bin") == "/usr/bin"
    found = Finding("x", "/Users/ada/a", "wrong", "see /Users/ada/b", "delete /Users/ada/c")
    examined = [Examined("kernels", 0.5, (found,))]
    assert "ada" not in as_page(examined, 1.0) + json.dumps(as_document(examined, 1.0))


def test_what_is_off_says_what_it_means() -> None:
    with pytest.raises(AssertionError):
        Finding("x", "y", "wrong")
    with pytest.raises(AssertionError):
        Finding("x", "y", "ok", "means", "remedy")
    assert checked("x", "y", {}, ok=True, means="bad").means is None
    assert checked("x", "y", {}, ok=False, means="bad").level == "wrong"


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.usefixtures("few_steps")
def test_the_fake_backend(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, "fake")
    assert list(found) == ["machine", "model", "choices", "batch", "steps"]
    assert found["batch"]["batched = alone"]["level"] == "ok"


@pytest.mark.usefixtures("few_steps")
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


@pytest.mark.usefixtures("few_steps")
@pytest.mark.slow
def test_torch_with_safe(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    found = report(capsys, "torch", EngineConfig(safe=True))
    assert list(found) == ["machine", "device", "launches", "model", "choices", "batch", "steps"]
    assert "--safe" in found["choices"]["layers"]["value"]
    assert found["batch"]["batched = alone"]["level"] == "ok"


@pytest.mark.usefixtures("few_steps")
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
