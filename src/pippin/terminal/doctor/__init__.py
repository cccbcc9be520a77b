"""`pippin doctor`: whether this machine computes correct results, and how fast. Asserts no time.

A section is a function that yields findings.
"""

from __future__ import annotations

import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from time import monotonic

from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import ConfigError, LoadError, PippinError
from pippin.startup.resolve import resolve
from pippin.terminal.doctor.engine import Engine, batch, drafts, library_of, plain, steps
from pippin.terminal.doctor.report import (
    ISSUE,
    SAFE,
    Examined,
    Finding,
    as_document,
    as_page,
    is_right,
)
from pippin.version import installed_versions

LIBRARIES = ("mlx", "mlx-lm", "numpy", "transformers", "tokenizers", "torch", "triton")
LIMIT_SECONDS = 60.0  # of the demo model; after it no further times are measured


@dataclass(frozen=True)
class Section:
    name: str  # stable: programs look for it
    doing: str  # shown while it runs
    look: Callable[[], Iterator[Finding]]


def run_doctor(config: Config, *, as_json: bool, saves: bool = False) -> int:
    """Print the report; the exit status, 1 if something is wrong. Progress is on stderr."""
    started = monotonic()
    deadline = started + LIMIT_SECONDS
    examined = [_examine(section) for section in sections(config, deadline, saves=saves)]
    seconds = monotonic() - started
    if as_json:
        print(json.dumps(as_document(examined, seconds), indent=2))
    else:
        print(as_page(examined, seconds))
    return 0 if is_right(examined) else 1


def _examine(section: Section) -> Examined:
    print(f"pippin doctor: {section.doing} ...", file=sys.stderr, flush=True)
    started = monotonic()
    findings = tuple(_findings(section))
    return Examined(section.name, round(monotonic() - started, 2), findings)


def _findings(section: Section) -> Iterator[Finding]:
    """A section that fails is a finding; the others still run."""
    try:
        yield from section.look()
    except ConfigError:  # of usage: status 2
        raise
    except PippinError as error:
        means = f"{section.doing} is not possible with these options"
        yield Finding(section.name, error.message, "wrong", means, "do as the message says")
    except Exception as error:
        traceback.print_exc()
        means = f"{section.doing} failed, and `pippin serve` may fail there too"
        remedy = f"{SAFE}, with the traceback above" if section.name != "machine" else ISSUE
        yield Finding(section.name, f"{type(error).__name__}: {error}", "wrong", means, remedy)


def sections(config: Config, deadline: float, *, saves: bool = False) -> Iterator[Section]:
    """`saves`: what drafts gain."""
    yield Section("machine", "reading versions", partial(machine, config))
    try:
        config = resolve(config)
    except LoadError as error:
        yield Section("model", "finding the model", partial(_not_found, error.message))
        return
    options = config.engine
    if config.model.backend == "mlx":
        from pippin.backends.mlx import environment  # imports mlx

        environment.prepare(deterministic=options.deterministic, buffer_limit=options.buffer_limit)
    if (library := library_of(config)) is not None:
        yield Section("device", "querying the device", library.device)
        yield Section("launches", "timing launches", library.launches)
        if config.model.backend == "mlx":
            doing = "comparing operations with plain ones (the first time on a Linux CPU they are "
            look = partial(library.kernels, safe=options.safe)
            yield Section("kernels", f"{doing}compiled)", look)
    engine = Engine(config, deadline)
    yield Section("model", "loading the model", engine.load)
    if not engine.is_loaded:  # nothing to look at
        return
    yield Section("choices", "reading what was chosen", engine.choices)
    yield Section("batch", "comparing a batch with single requests", partial(batch, engine))
    yield Section("steps", "timing decode steps", partial(steps, engine))
    if options.safe or library is None:
        return
    yield Section("plain", "comparing with plain operations", partial(plain, engine))
    if not options.deterministic:
        yield Section("drafts", "timing replies with drafts", partial(drafts, engine, saves=saves))


def _not_found(message: str) -> Iterator[Finding]:
    yield Finding(
        "model",
        message,
        "wrong",
        means="there is no model to check, so only this machine's versions are known",
        remedy="do as the message says, or name another model: pippin doctor MODEL",
    )


def machine(config: Config) -> Iterator[Finding]:
    yield Finding("platform", platform.platform())
    yield _python()
    found = installed_versions(LIBRARIES)
    yield Finding("libraries", ", ".join(f"{name} {version}" for name, version in found.items()))
    if absent := [name for name in LIBRARIES if name not in found]:
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


def _given(config: Config) -> Iterator[str]:
    """Of the model and the engine, neither of which has secrets."""
    for given, usual in ((config.model, ModelConfig()), (config.engine, EngineConfig())):
        for field in fields(given):
            value = getattr(given, field.name)
            if value != getattr(usual, field.name):
                option = f"--{field.name.replace('_', '-')}"
                yield option if value is True else f"{option} {value}"
