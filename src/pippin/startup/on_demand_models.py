"""Several models of one server, each loaded when a request needs it.

One memory budget for all is divided at start; a model that does not fit alone is refused then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pippin.amounts import parse_bytes
from pippin.api.served_models import ServedModels, SwitchedModel, TextCache
from pippin.config import Config, PeersConfig
from pippin.durations import FOR_EVER, parse_duration
from pippin.errors import ConfigError
from pippin.startup.checkpoint import context_length, load_text, model_info, vocabulary_size
from pippin.startup.replicas import (
    SupervisedEngine,
    budget_bytes,
    check_fit,
    divide,
    least_bytes,
)
from pippin.switching.model_engines import ModelEngines
from pippin.switching.turns import ModelTurn, Turns

DEFAULT_KEEP_ALIVE_S = 300.0  # as Ollama's
BATCH_RUNNING = 8  # requests of batches in all engines; see --batch-running
ONE_MODEL_ONLY = ("kv_events", "step_log", "trace")


def is_on_demand(configs: Sequence[Config]) -> bool:
    return len(configs) > 1 or configs[0].server.keep_alive is not None


def check_several(config: Config, num_models: int) -> None:
    """Raise ConfigError for options that only one model can have."""
    for option in ONE_MODEL_ONLY:
        if getattr(config.server, option) is not None:
            raise ConfigError(
                f"{option} is of one engine, and {num_models} models are served: remove "
                f"--{option.replace('_', '-')}, or serve one model"
            )
    if config.peers != PeersConfig():
        raise ConfigError(
            f"role is of one model, and {num_models} are served: remove --role and its options, or "
            "serve one model"
        )
    if config.server.served_name is not None and num_models > 1:
        raise ConfigError(
            f"served_name is {config.server.served_name!r}, and {num_models} models are served: "
            "name each in the [models] table of pippin.toml"
        )


class OnDemandModels:
    def __init__(self, configs: Sequence[Config], memory: Config) -> None:
        """Of resolved configs; `memory`: with the budget for all."""
        self.config = configs[0]
        _check_names(configs)
        budget = budget_bytes(memory)
        leasts = [_claim(config) for config in configs]
        for config, least in zip(configs, leasts, strict=True):
            check_fit(budget, config, least)
        self._configs: dict[str, Config] = {}
        turns = []
        for config, claim in zip(configs, divide(budget, leasts), strict=True):
            name = str(config.server.served_name)
            self._configs[name] = _alone(config, claim, len(configs))
            turns.append(ModelTurn(name, claim, keep_alive_s(config)))
        turn_s, max_waiting = self.config.server.model_turn, self.config.engine.max_queue
        self.engine = ModelEngines(
            Turns(turns, budget=budget, turn_s=turn_s, max_waiting=max_waiting), self._start
        )
        texts = TextCache()
        self.models = ServedModels([self._served(config, texts) for config in configs])

    async def run(self) -> None:
        await self.engine.run()

    def _start(self, name: str) -> SupervisedEngine:
        return SupervisedEngine(self._configs[name], on_loading=lambda stage: None)

    def _served(self, config: Config, texts: TextCache) -> SwitchedModel:
        """Described as far as its files say: exactly when it is loaded."""
        path, own = Path(config.model.model), str(config.server.served_name)
        info = model_info(
            config,
            config.model.max_len or context_length(path),
            vocabulary_size(path),
            other_names=tuple(name for name in self._configs if name != own),
            on_demand=True,
        )
        load = partial(load_text, config)
        return SwitchedModel(info, self.engine, texts, load, self.config.server, config.limits)


def keep_alive_s(config: Config) -> float | None:
    given = config.server.keep_alive
    seconds = DEFAULT_KEEP_ALIVE_S if given is None else parse_duration(given)
    return None if seconds == FOR_EVER else seconds


def _claim(config: Config) -> int:
    """At least; a model's own `memory` is what it gets."""
    if config.engine.memory != "auto":
        return parse_bytes(f"memory of {config.server.served_name}", config.engine.memory)
    return least_bytes(config) * config.server.replicas_per_device


def _alone(config: Config, claim: int, num_models: int) -> Config:
    """As its engine is started: with its part of the memory and of the disk."""
    own = config.engine
    if own.cache_dir is not None and own.disk is not None and num_models > 1:
        folder = re.sub(r"[^\w.-]|^\.+", "_", str(config.server.served_name))
        part = parse_bytes("disk", own.disk) // num_models
        own = replace(own, cache_dir=str(Path(own.cache_dir) / folder), disk=str(part))
    memory = claim if own.memory == "auto" else parse_bytes("memory", own.memory)
    return replace(config, engine=replace(own, memory=str(memory)))


def _check_names(configs: Sequence[Config]) -> None:
    owners: dict[str, str] = {}
    for config in configs:
        own = str(config.server.served_name)
        for name in dict.fromkeys((own, *config.server.alias)):
            if name in owners:
                raise ConfigError(
                    f"models: {own} and {owners[name]} have the same name {name!r}: give one "
                    "of them another alias, or another name in the [models] table of pippin.toml"
                )
            owners[name] = own
