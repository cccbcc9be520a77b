"""Runs commands in this process, up to the moment when they would start something."""

from __future__ import annotations

import pytest

from pippin import cli
from pippin.config import Config


def served_with(monkeypatch: pytest.MonkeyPatch, *argv: str) -> Config:
    """The Config that `pippin serve ARGV` starts the server with."""
    config, models = served_models(monkeypatch, *argv)
    assert models == []
    return config


def served_models(monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[Config, list[Config]]:
    """The same, and those of several models."""
    seen: list[tuple[Config, list[Config]]] = []
    monkeypatch.setattr(
        "pippin.startup.launch.run_server", lambda config, models: seen.append((config, models))
    )
    with pytest.raises(SystemExit) as exited:
        cli.main(["serve", *argv])
    assert exited.value.code == 0
    return seen[0]


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit status and message, unwrapped, of a command that must fail."""
    with pytest.raises(SystemExit) as exited:
        cli.main(argv)
    assert isinstance(exited.value.code, int)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return exited.value.code, " ".join(err.replace("│", " ").split())


def output_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command that must succeed prints."""
    with pytest.raises(SystemExit) as exited:
        cli.main(argv)
    assert exited.value.code == 0
    return capsys.readouterr().out
