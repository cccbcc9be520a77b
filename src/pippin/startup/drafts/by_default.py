"""`--speculate` where nothing is given: on if drafts were measured to pay here, else off."""

from __future__ import annotations

import logging
from dataclasses import replace

from pippin.config import EngineConfig, ModelConfig, Speculate
from pippin.startup.drafts.measured_gain import measured_gain

logger = logging.getLogger(__name__)


def resolve_speculate(engine: EngineConfig, model: ModelConfig) -> EngineConfig:
    """`model` is resolved. What was given stays."""
    if engine.speculate is not None:
        return engine
    return replace(engine, speculate=_by_default(engine, model))


def _by_default(engine: EngineConfig, model: ModelConfig) -> Speculate:
    if engine.deterministic or engine.safe:  # which have no drafts
        return "off"
    gain = measured_gain(model)
    if gain is None or not gain.pays:
        return "off"
    logger.info(
        "speculate: auto: pippin doctor measured %.2f times as fast here on %s, for %s",
        gain.ratio,
        gain.day,
        gain.served.model,
    )
    return "auto"
