"""Runs the sections and prints the report. Knows nothing that they look at."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic

from pippin.config import Config
from pippin.errors import ConfigError, LoadError, PippinError
from pippin.startup.resolve import resolve
from pippin.terminal.doctor.engine import Engine
from pippin.terminal.doctor.machine import machine
from pippin.terminal.doctor.report import (
    ISSUE,
    SAFE,
    Examined,
    Finding,
    Section,
    TimeLimit,
    as_document,
    as_page,
    is_right,
)


def sections(config: Config, limit: TimeLimit, *, saves: bool = False) -> Iterator[Section]:
    """`saves`: what drafts gain."""
    yield Section("machine", "reading versions", partial(machine, config))
    try:
        config = resolve(config)
    except LoadError as error:
        yield Section("model", "finding the model", partial(_not_found, error.message))
        return
    match config.model.backend:
        case "mlx":
            yield from _of_mlx(config)
        case "torch":
            yield from _of_torch()
    engine = Engine(config)
    for name, doing, look in _of_engine(config, engine, limit, saves=saves):
        if engine.failed:  # nothing to look at
            return
        yield Section(name, doing, look)


def _of_mlx(config: Config) -> Iterator[Section]:
    from pippin.backends.mlx import environment  # imports mlx

    options = config.engine
    environment.prepare(deterministic=options.deterministic, buffer_limit=options.buffer_limit)
    from pippin.terminal.doctor.on_mlx import device, kernels, launches

    yield Section("device", "querying the device", device)
    yield Section("launches", "timing launches", launches)
    yield Section(
        "kernels",
        "comparing operations with plain ones (the first time on a Linux CPU they are compiled)",
        partial(kernels, safe=options.safe),
    )


def _of_torch() -> Iterator[Section]:
    from pippin.terminal.doctor.on_torch import device, launches

    yield Section("device", "querying the device", device)
    yield Section("launches", "timing launches", launches)


def _of_engine(
    config: Config, engine: Engine, limit: TimeLimit, *, saves: bool
) -> Iterator[tuple[str, str, Callable[[], Iterator[Finding]]]]:
    from pippin.terminal.doctor import engine as drafts
    from pippin.terminal.doctor import engine as replies
    from pippin.terminal.doctor import engine as steps

    yield "model", "loading the model", engine.load
    yield "choices", "reading what was chosen", engine.choices
    yield "batch", "comparing a batch with single requests", partial(replies.batch, engine)
    yield "steps", "timing decode steps", partial(steps.steps, engine, limit)
    if not config.engine.safe and config.model.backend != "fake":
        yield "plain", "comparing with plain operations", partial(replies.plain, engine)
        if not config.engine.deterministic:
            look = partial(drafts.drafts, engine, limit, saves=saves)
            yield "drafts", "timing replies with drafts", look


def _not_found(message: str) -> Iterator[Finding]:
    yield Finding(
        "model",
        message,
        "wrong",
        means="there is no model to check, so only this machine's versions are known",
        remedy="do as the message says, or name another model: pippin doctor MODEL",
    )


LIMIT_SECONDS = 60.0  # of the demo model; after it no further times are measured


def run_doctor(config: Config, *, as_json: bool, saves: bool = False) -> int:
    """Print the report; the exit status, 1 if something is wrong. Progress is on stderr."""
    limit = TimeLimit(LIMIT_SECONDS)
    examined = [_examine(section) for section in sections(config, limit, saves=saves)]
    if as_json:
        print(json.dumps(as_document(examined, limit.passed()), indent=2))
    else:
        print(as_page(examined, limit.passed()))
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
