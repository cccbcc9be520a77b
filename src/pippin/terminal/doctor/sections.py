"""Which sections there are for these options, in order. To add one: a file, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from pippin.config import Config
from pippin.errors import LoadError
from pippin.startup.resolve import resolve
from pippin.terminal.doctor.engine import Engine
from pippin.terminal.doctor.findings import Finding, Section, TimeLimit
from pippin.terminal.doctor.machine import machine


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
    from pippin.terminal.doctor.on_mlx.device import device, launches  # mlx reads what is set
    from pippin.terminal.doctor.on_mlx.kernels import kernels

    yield Section("device", "querying the device", device)
    yield Section("launches", "timing launches", launches)
    yield Section(
        "kernels",
        "comparing operations with plain ones (the first time on a Linux CPU they are compiled)",
        partial(kernels, safe=options.safe),
    )


def _of_torch() -> Iterator[Section]:
    from pippin.terminal.doctor.on_torch.device import device, launches  # it may not be installed

    yield Section("device", "querying the device", device)
    yield Section("launches", "timing launches", launches)


def _of_engine(
    config: Config, engine: Engine, limit: TimeLimit, *, saves: bool
) -> Iterator[tuple[str, str, Callable[[], Iterator[Finding]]]]:
    from pippin.terminal.doctor import drafts, replies, steps

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
