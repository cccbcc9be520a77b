"""Versions, the operating system, and the options that were given. Imports no array library."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from dataclasses import fields

from pippin.config import Config, EngineConfig, ModelConfig
from pippin.terminal.doctor.report import Finding

LIBRARIES = ("mlx", "mlx-lm", "numpy", "transformers", "tokenizers", "torch", "triton")


def machine(config: Config) -> Iterator[Finding]:
    yield Finding("platform", platform.platform())
    yield _python()
    found = {name: _version(name) for name in LIBRARIES}
    installed = [f"{name} {version}" for name, version in found.items() if version is not None]
    absent = [name for name, version in found.items() if version is None]
    yield Finding("libraries", ", ".join(installed))
    if absent:
        yield Finding("not installed", ", ".join(absent))
    yield Finding("options", " ".join(_given(config)) or "defaults")


def _python() -> Finding:
    version = f"{platform.python_version()} for {platform.machine()} at {sys.executable}"
    if platform.system() == "Darwin" and platform.machine() != "arm64":
        return Finding(
            "python",
            version,
            "wrong",
            means="this Python is built for Intel and runs in Rosetta: mlx has no Metal there",
            remedy="install a Python for Apple Silicon (`brew install python@3.13` in an arm64 "
            "terminal, or from python.org), and make the virtual environment again",
        )
    return Finding("python", version)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _given(config: Config) -> Iterator[str]:
    """Of the model and the engine, neither of which has secrets."""
    for given, usual in ((config.model, ModelConfig()), (config.engine, EngineConfig())):
        for field in fields(given):
            value = getattr(given, field.name)
            if value != getattr(usual, field.name):
                option = f"--{field.name.replace('_', '-')}"
                yield option if value is True else f"{option} {value}"
