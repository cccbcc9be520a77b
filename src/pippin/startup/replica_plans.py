"""The part of a config that each replica is started with. Knows no process.

one device for all      its memory, the host's and CPU threads are divided
a device for each       CUDA_VISIBLE_DEVICES names it; its memory is not divided
disk                    a folder for each, since one process writes a folder
KV events               ports that follow each other, as vLLM's ranks have them
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from pippin.amounts import parse_bytes, split_amount
from pippin.backends.host import THREAD_LIMITS, num_threads
from pippin.config import Config, EngineConfig, ServerConfig
from pippin.config.server import event_address
from pippin.errors import ConfigError

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
    server = config.server
    environment: dict[str, str] = {}
    sharing = count
    if server.devices is not None:
        device = server.device_names[number]
        sharing = server.device_names.count(device)
        environment[CUDA_DEVICES] = device
    if count == 1:
        return ReplicaPlan(config, environment)
    threads = str(max(num_threads() // count, 1))
    environment |= dict.fromkeys(THREAD_LIMITS, threads)
    own = replace(
        config,
        engine=_engine(config.engine, number, count, sharing),
        server=_server(server, number),
    )
    return ReplicaPlan(own, environment)


def _engine(engine: EngineConfig, number: int, count: int, sharing: int) -> EngineConfig:
    amount, parts = split_amount(engine.memory)
    folder = None if engine.cache_dir is None else Path(engine.cache_dir) / f"replica-{number}"
    return replace(
        engine,
        memory=f"{amount}/{parts * sharing}" if parts * sharing > 1 else engine.memory,
        host_cache=_divided("host_cache", engine.host_cache, count),
        cache_dir=None if folder is None else str(folder),
        disk=_divided("disk", engine.disk, count),
    )


def _divided(name: str, amount: str | None, count: int) -> str | None:
    return None if amount is None else str(parse_bytes(name, amount) // count)


def _server(server: ServerConfig, number: int) -> ServerConfig:
    return replace(
        server,
        kv_events=_next_port("kv_events", server.kv_events, number),
        kv_events_replay=_next_port("kv_events_replay", server.kv_events_replay, number),
    )


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
