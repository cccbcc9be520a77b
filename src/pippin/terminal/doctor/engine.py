"""The engine that the sections look at: loaded once, as `pippin serve` loads it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pippin import LLM
from pippin.amounts import show_bytes
from pippin.backends.fallbacks import logger as fallbacks_log
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.terminal.doctor.findings import ISSUE, Finding

# How far apart, in log probability, two tokens may be whose order depends on the shape of a batch.
MARGINS = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
TF32_MARGIN = MARGINS["float16"]  # the same ten bits


class Engine:
    def __init__(self, config: Config) -> None:
        engine = replace(config.engine, prefix_cache=False, cache_dir=None, disk=None)
        engine = replace(engine, host_cache=None, canary="off")
        self._config = replace(config, engine=engine)
        self._llm: LLM | None = None
        self.failed = False

    @property
    def llm(self) -> LLM:
        assert self._llm is not None, "`load` runs first"
        return self._llm

    def load(self) -> Iterator[Finding]:
        """One load, as a server would: in the model's own type, within the budget."""
        self.failed = True
        with _warnings() as warned:
            self._llm = LLM(config=self._config)
        self.failed = False
        backend = self._llm.loop.backend
        used, room = backend.memory_used(), self._llm.loop.scheduler.budget.capacity
        yield Finding(
            "budget",
            f"{show_bytes(used)} used by the model, {show_bytes(room)} for requests",
            numbers={"model_bytes": used, "request_bytes": room},
        )
        limits = self._llm.loop.scheduler.limits
        yield Finding(
            "running",
            f"{limits.max_running} requests at the same time ({limits.max_running_reason})",
            numbers={"max_running": limits.max_running},
        )
        for fallback in backend.fallbacks:
            yield Finding(
                "fallback",
                str(fallback),
                "warning",
                means="`pippin serve` does the same: replies are right and may be slower",
                remedy=ISSUE,
            )
        for message in warned:
            yield Finding(
                "load warned",
                message,
                "warning",
                means="`pippin serve` does without it: replies are right and may be slower",
                remedy=ISSUE,
            )

    def choices(self) -> Iterator[Finding]:
        match self._config.model.backend:
            case "mlx":
                from pippin.terminal.doctor.on_mlx.choices import choices as of_mlx

                yield from of_mlx(self.llm)
            case "torch":
                from pippin.terminal.doctor.on_torch.choices import choices as of_torch

                yield from of_torch(self.llm)

    def safe(self) -> LLM:
        """The same model with --safe."""
        return self._instead(
            replace(self._config.engine, safe=True, speculate="off", draft_model=None)
        )

    def drafting(self) -> LLM:
        return self._instead(replace(self._config.engine, speculate="auto"))

    @property
    def model(self) -> ModelConfig:
        """As it was resolved: what is loaded."""
        return self.llm.config.model

    @property
    def has_draft_model(self) -> bool:
        return self._config.engine.draft_model is not None

    def _instead(self, options: EngineConfig) -> LLM:
        """In place of the engine that was loaded: both may not fit."""
        if self._llm is not None:
            self._llm.close()
        self._llm = None
        gc.collect()
        self._llm = LLM(config=replace(self._config, engine=options))
        return self._llm

    @property
    def is_plain(self) -> bool:
        """Whether --safe would change nothing."""
        if self._config.model.backend != "torch":
            return False
        from pippin.terminal.doctor.on_torch.choices import is_plain

        return is_plain(self.llm)

    @property
    def margin(self) -> float:
        """Of log probabilities that rounding may move."""
        match self._config.model.backend:
            case "mlx":
                from pippin.backends.mlx.environment import products_are_exact
                from pippin.terminal.doctor.on_mlx.choices import dtype_of as dtype_of_mlx

                margin = MARGINS[dtype_of_mlx(self.llm)]
                is_rounded = self.llm.loop.backend.device.kind != "cpu" and not products_are_exact()
                return max(margin, TF32_MARGIN) if is_rounded else margin
            case "torch":
                from pippin.terminal.doctor.on_torch.choices import dtype_of as dtype_of_torch

                return MARGINS[dtype_of_torch(self.llm)]
        return 0.0


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What is logged inside: a kernel that is not used, a file that cannot be written."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name != fallbacks_log.name:  # the backend lists them
                found.append(record.getMessage())

    handler = Kept(logging.WARNING)
    logger = logging.getLogger("pippin")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
