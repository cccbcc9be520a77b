"""`pippin doctor`: whether this machine computes correct results, and how fast. Asserts no time.

A section is a function that yields findings: lines of one page of text to paste, or of JSON
(schema.json). Paths of the user's home are shortened to ~.
"""

from __future__ import annotations

import json
import math
import platform
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import ConfigError, LoadError, PippinError
from pippin.startup.resolve import resolve
from pippin.version import __version__, installed_versions

# info: not checked.  ok: checked.  warning: correct, but not as it should be.  wrong: status 1.
Level = Literal["info", "ok", "warning", "wrong"]

SAFE = "serve with --safe, and paste this page into an issue"
ISSUE = "paste this page into an issue"


@dataclass(frozen=True)
class Finding:
    """One line. A warning, or what is wrong, also says what it means and what to do."""

    name: str
    value: str
    level: Level = "info"
    means: str | None = None
    remedy: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)  # for programs

    def __post_init__(self) -> None:
        is_off = self.level in ("warning", "wrong")
        assert is_off == (self.means is not None) == (self.remedy is not None), self.name


def checked(
    name: str, value: str, numbers: Mapping[str, float], *, ok: bool, means: str, remedy: str = SAFE
) -> Finding:
    """`means` and `remedy`: where it is not right."""
    if ok:
        return Finding(name, value, "ok", numbers=numbers)
    return Finding(name, value, "wrong", means, remedy, numbers)


@dataclass(frozen=True)
class Examined:
    """A section that has run."""

    name: str  # stable: programs look for it
    seconds: float
    findings: tuple[Finding, ...]


SCHEMA_VERSION = 1  # raised when a field changes its meaning or is removed; not when one is added
SCHEMA = Path(__file__).with_name("schema.json")
MARKS = {"info": "  ", "ok": "✓ ", "warning": "! ", "wrong": "✗ "}
HOMES = re.compile(r"(?:/Users|/home)/[^/\s:'\"]+")
INDENT = " " * 6


def is_right(examined: Iterable[Examined]) -> bool:
    return not any(found.level == "wrong" for part in examined for found in part.findings)


def as_page(examined: Sequence[Examined], seconds: float) -> str:
    lines = [f"pippin doctor {__version__}: {_verdict(examined)} ({seconds:.0f} s)"]
    for part in examined:
        if part.findings:
            lines += ["", part.name]
            lines += [line for found in part.findings for line in _lines(found)]
    return "\n".join(lines)


def _verdict(examined: Sequence[Examined]) -> str:
    levels = [found.level for part in examined for found in part.findings]
    wrong, warnings = levels.count("wrong"), levels.count("warning")
    said = [f"{_count(wrong, 'check')} failed"] if wrong else []
    said += [_count(warnings, "warning")] if warnings else []
    return ", ".join([*(said or ["all right"]), f"{_count(levels.count('ok'), 'check')} passed"])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _lines(found: Finding) -> Iterator[str]:
    yield f"  {MARKS[found.level]}{found.name}: {private(found.value)}"
    if found.means is not None and found.remedy is not None:
        yield f"{INDENT}meaning: {private(found.means)}"
        yield f"{INDENT}what to do: {private(found.remedy)}"


def as_document(examined: Sequence[Examined], seconds: float) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "pippin": __version__,
        "ok": is_right(examined),
        "seconds": round(seconds, 2),
        "sections": [
            {
                "name": part.name,
                "seconds": part.seconds,
                "findings": [_entry(found) for found in part.findings],
            }
            for part in examined
        ],
    }


def _entry(found: Finding) -> dict[str, Any]:
    return {
        "name": found.name,
        "level": found.level,
        "value": private(found.value),
        "means": None if found.means is None else private(found.means),
        "remedy": None if found.remedy is None else private(found.remedy),
        "numbers": {key: n for key, n in found.numbers.items() if math.isfinite(n)},  # JSON's
    }


def private(text: str) -> str:
    """Without the user's name."""
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=[/\s:'\",;)]|$)", "~", text)
    return HOMES.sub("~", text)


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
    from pippin.terminal.doctor.engine import Engine, batch, drafts, library_of, plain, steps

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
        for each in fields(given):
            value = getattr(given, each.name)
            if value != getattr(usual, each.name):
                option = f"--{each.name.replace('_', '-')}"
                yield option if value is True else f"{option} {value}"
