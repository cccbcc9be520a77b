"""The engine processes of one model, and several models that are loaded when a request needs them.

One memory budget for all models is divided at start; a model that does not fit alone is refused
then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pippin.amounts import (
    FOR_EVER,
    budget_of,
    option_bytes,
    parse_bytes,
    parse_duration,
    show_bytes,
    split_amount,
)
from pippin.api.served_models import ServedModels, SwitchedModel, TextCache
from pippin.backends.host import THREAD_LIMITS, host_memory_bytes, num_threads
from pippin.backends.nvidia import memory_bytes
from pippin.config import Config, PeersConfig, event_address
from pippin.engine.engine_client import EngineClient
from pippin.engine.engine_pool import EnginePool
from pippin.errors import ConfigError, EngineDead, LoadError
from pippin.messages import Ready
from pippin.startup.checkpoint import (
    context_length,
    load_text,
    model_info,
    text_options,
    vocabulary_size,
)
from pippin.supervision import Supervisor
from pippin.switching import ModelEngines, ModelTurn, Turns
from pippin.text.tokenizer import read_json

SIGNS = re.compile(
    r"killed by SIGKILL|out of memory|bad_alloc|MemoryError|cannot allocate|unable to allocate"
    r"|attempting to allocate|malloc|ENOMEM",
    re.IGNORECASE,
)


def with_remedy(reason: str, config: Config) -> str:
    """Why a resolved config's model could not be loaded, with a remedy if memory was too small.

    A backend that measures its memory names a remedy itself ("memory: ..."). This is for the
    others: an allocation that failed inside a library, or a process that the system killed.
    """
    if reason.startswith("memory:") or not SIGNS.search(reason):
        return reason
    if "killed by SIGKILL" in reason:
        reason += " while it loaded the model, probably because memory ran out"
    widened = ""  # 16-bit weights take twice their size on disk on a CPU
    if config.model.dtype in ("auto", "float32"):
        widened = " (on a CPU 16-bit weights take twice that: --dtype bfloat16 keeps their size)"
    return (
        f"{reason}. The weights are {show_bytes(_weight_bytes(config))} on disk, and this machine "
        f"has {show_bytes(host_memory_bytes())} of memory{widened}: stop other programs, use a "
        "smaller or quantized model, or lower --max-model-len and --max-running"
    )


def _weight_bytes(config: Config) -> int:
    paths = [Path(path) for path in (config.model.model, config.engine.draft_model) if path]
    return sum(file.stat().st_size for path in paths for file in path.glob("model*.safetensors"))


SHARE_OF_GPU, SHARE_OF_METAL, SHARE_OF_HOST = 0.85, 0.65, 0.5
SPARE = 1.3  # buffers of steps, as a factor of the weights
ENGINE_BYTES = 64_000_000
LEAST_TOKENS = 4096  # of KV cache
SIXTEEN_BITS = ("bfloat16", "float16")


def budget_bytes(config: Config) -> int:
    """`--memory` for all models together. `config` is resolved."""
    of_gpu = memory_bytes() if config.model.backend == "torch" else None
    on_metal = platform.system() == "Darwin"
    share = SHARE_OF_GPU if of_gpu else SHARE_OF_METAL if on_metal else SHARE_OF_HOST
    return budget_of(config.engine.memory, of_gpu or host_memory_bytes(), share)


def least_bytes(config: Config) -> int:
    """About what a model needs: its weights, buffers, and the keys and values of a short prompt."""
    options = text_options(read_json(Path(config.model.model) / "config.json"))
    factor = _widening(config, options)
    kv = _least_kv_bytes(config, options, factor)
    return int(SPARE * factor * _weight_bytes(config)) + ENGINE_BYTES + kv


def divide(budget: int, leasts: Sequence[int]) -> list[int]:
    """What each model claims. Each of `leasts` fits alone."""
    largest = sorted(leasts, reverse=True)
    together = max(k for k in range(1, len(largest) + 1) if sum(largest[:k]) <= budget)
    spare = (budget - sum(largest[:together])) // together
    return [least + spare for least in leasts]


def check_fit(budget: int, config: Config, least: int) -> None:
    if least > budget:
        sharing = config.server.replicas_per_device
        replicas = f" for {sharing} replicas" if sharing > 1 else ""
        raise LoadError(
            f"memory: the model {config.server.served_name} needs about {show_bytes(least)}"
            f"{replicas}, and the budget for all models is {show_bytes(budget)}: use --memory "
            f"{option_bytes(least)} or more, a smaller or quantized model, or a lower max-len"
        )


def _widening(config: Config, options: dict[str, Any]) -> int:
    """On a CPU 16-bit weights are computed with as float32, unless a data type is given."""
    stored = options.get("dtype") or options.get("torch_dtype")
    on_cpu = platform.system() != "Darwin" and memory_bytes() is None
    is_quantized = bool(options.get("quantization") or options.get("quantization_config"))
    widened = config.model.dtype == "float32" or (config.model.dtype == "auto" and on_cpu)
    return 2 if widened and not is_quantized and stored in SIXTEEN_BITS else 1


def _least_kv_bytes(config: Config, options: dict[str, Any], factor: int) -> int:
    """0 where config.json has other names for it."""
    heads = options.get("num_key_value_heads") or options.get("num_attention_heads")
    layers, hidden = options.get("num_hidden_layers"), options.get("hidden_size")
    queries = options.get("num_attention_heads")
    sizes = (heads, layers, hidden, queries)
    if not all(isinstance(each, int) and each > 0 for each in sizes):
        return 0
    head_dim = options.get("head_dim") or math.ceil(hidden / queries)  # type: ignore[operator]
    tokens = min(config.model.max_len or LEAST_TOKENS, LEAST_TOKENS)
    return int(2 * layers * heads * head_dim * 2 * factor * tokens)  # type: ignore[operator]


CUDA_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class ReplicaPlan:
    config: Config
    environment: dict[str, str] = field(default_factory=dict)


def plan_replicas(config: Config) -> list[ReplicaPlan]:
    """One for each replica. Raises ConfigError for options that replicas cannot have."""
    count = config.server.num_replicas
    if count > 1:
        _check(config, count)
    return [_plan(config, number, count) for number in range(count)]


def _plan(config: Config, number: int, count: int) -> ReplicaPlan:
    server, engine = config.server, config.engine
    environment: dict[str, str] = {}
    sharing = count
    if server.devices is not None:
        device = server.device_names[number]
        sharing = server.device_names.count(device)
        environment[CUDA_DEVICES] = device
    if count == 1:
        return ReplicaPlan(config, environment)
    environment |= dict.fromkeys(THREAD_LIMITS, str(max(num_threads() // count, 1)))
    amount, parts = split_amount(engine.memory)
    folder = engine.cache_dir and str(Path(engine.cache_dir) / f"replica-{number}")
    own = replace(
        config,
        engine=replace(
            engine,
            memory=f"{amount}/{parts * sharing}" if parts * sharing > 1 else engine.memory,
            host_cache=_divided("host_cache", engine.host_cache, count),
            cache_dir=folder,
            disk=_divided("disk", engine.disk, count),
        ),
        server=replace(
            server,
            kv_events=_next_port("kv_events", server.kv_events, number),
            kv_events_replay=_next_port("kv_events_replay", server.kv_events_replay, number),
        ),
    )
    return ReplicaPlan(own, environment)


def _divided(name: str, amount: str | None, count: int) -> str | None:
    return None if amount is None else str(parse_bytes(name, amount) // count)


def _next_port(option: str, address: str | None, number: int) -> str | None:
    if address is None:
        return None
    port = event_address(option, address)[1]
    return f"{address.removesuffix(str(port))}{port + number}"


def _check(config: Config, count: int) -> None:
    if config.peers.role != "alone":
        raise ConfigError(
            f"role is {config.peers.role}, and there are {count} replicas: an engine of a pair "
            "has a server of its own; remove --replicas and --devices, or --role"
        )
    server = config.server
    if server.kv_events is None:
        return
    ports = [event_address("kv_events", server.kv_events)[1]]
    if server.kv_events_replay is not None:
        ports.append(event_address("kv_events_replay", server.kv_events_replay)[1])
    if max(ports) + count - 1 > 65535 or (len(ports) > 1 and abs(ports[0] - ports[1]) < count):
        raise ConfigError(
            f"kv_events takes {count} ports, one for each replica, from the port of "
            "--kv-events and of --kv-events-replay on: choose ports with as much room between them"
        )


logger = logging.getLogger(__name__)


class SupervisedEngine:
    def __init__(self, config: Config, on_loading: Callable[[str], None]) -> None:
        """`config` is resolved; `on_loading` is called with each stage of the first load.

        Raises ConfigError for options that replicas cannot have.
        """
        self._config = config
        plans = plan_replicas(config)
        self.engine = EnginePool(len(plans))
        self._supervisors = [
            Supervisor(
                plan.config,
                client,
                on_loading,
                environment=plan.environment,
                replica=number if len(plans) > 1 else None,
            )
            for number, (plan, client) in enumerate(zip(plans, self.engine.replicas, strict=True))
        ]
        self.loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Until it is cancelled, or the engine was drained and has exited.

        Raises LoadError if the model cannot be loaded, EngineDead after too many restarts.
        """
        keeping = map(self._keep, self.engine.replicas, self._supervisors)
        running = [asyncio.create_task(work) for work in keeping]
        loading = asyncio.create_task(self._load())
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except LoadError as error:
            raise LoadError(with_remedy(error.message, self._config)) from error
        finally:
            for task in (loading, *running):
                task.cancel()  # once: each stops its process then
            await asyncio.gather(loading, *running, return_exceptions=True)

    async def _load(self) -> None:
        ready = [await supervisor.loaded for supervisor in self._supervisors]
        num_slots = sum(each.num_slots for each in ready)
        if not self.loaded.done():
            self.loaded.set_result(msgspec.structs.replace(ready[0], num_slots=num_slots))

    async def _keep(self, replica: EngineClient, supervisor: Supervisor) -> None:
        """One that failed too often waits until it is wanted again, while another one serves."""
        while True:
            try:
                return await supervisor.run()
            except EngineDead as error:
                replica.give_up(error.message)
                if not any(each.is_wanted.is_set() for each in self.engine.replicas):
                    raise
                logger.error("%s; this replica stays down, and others serve", error.message)
            await replica.is_wanted.wait()
            supervisor.forgive()


DEFAULT_KEEP_ALIVE_S = 300.0  # as Ollama's
BATCH_RUNNING = 8  # requests of batches in all engines; see --batch-running
ONE_MODEL_ONLY = ("kv_events", "step_log")


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
