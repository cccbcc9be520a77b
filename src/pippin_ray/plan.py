"""`pippin deploy ray`: the file, the options of `pippin serve` in it, and what Ray Serve is given.

Imports Ray only to deploy.

model = "Qwen/Qwen3.5-0.8B"     options of `pippin serve`, as in pippin.toml
[ray]                           replicas, and what each of them reserves
[prefill]                       engines that compute prompts for the others
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from cyclopts import App, Parameter

from pippin.cli.options import (
    KEYS,
    MODELS,
    SECRETS,
    Setting,
    near_name,
    option_name,
    parse_serve,
    read_config_file,
    source_of,
)
from pippin.config import Config, PeersConfig, check_at_least
from pippin.errors import ConfigError, PippinError

TABLES = ("ray", "prefill")
# A replica's own: a second one on the machine could not use it.
OF_ONE_SERVER = {
    "cache_dir": "engine",
    **dict.fromkeys(("kv_events", "kv_events_replay", "step_log"), "server"),
}


@dataclass(frozen=True)
class RayConfig:
    name: str = "pippin"
    """Name of the application in Ray Serve."""

    min_replicas: int = 1
    max_replicas: int = 1
    """Ray Serve starts and stops replicas between these, by the number of their requests."""

    target_ongoing_requests: float = 16
    """Requests of a replica, running or in its queue, that more replicas are started above."""

    max_ongoing_requests: int = 256
    """Requests of a replica above which further ones wait in the ingress."""

    max_imbalance: float = 16
    """By how many requests replicas may differ before load decides in place of the prefix."""

    num_cpus: float = 1
    num_gpus: float = 0
    """What Ray reserves for each replica."""

    ingress_replicas: int = 1
    """Processes that receive HTTP requests from Ray's proxies and choose a replica for each."""

    def __post_init__(self) -> None:
        check_at_least(self, min_replicas=1, max_ongoing_requests=1, max_imbalance=0)
        check_at_least(self, num_cpus=0, num_gpus=0, ingress_replicas=1)
        if not self.name or "#" in self.name:
            raise ConfigError(f"name is {self.name!r}: use a name without #")
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}, less than min_replicas "
                f"{self.min_replicas}: raise it"
            )
        if not self.target_ongoing_requests > 0:
            raise ConfigError(
                f"target_ongoing_requests must be more than 0, got {self.target_ongoing_requests}"
            )


@dataclass(frozen=True)
class PrefillConfig:
    replicas: int = 1
    port: int = 7000
    """Port of the first one; each further one has the next."""

    num_cpus: float = 1
    num_gpus: float = 0

    def __post_init__(self) -> None:
        check_at_least(self, replicas=1, num_cpus=0, num_gpus=0)
        if not 0 < self.port <= 65536 - self.replicas:
            raise ConfigError(
                f"port is {self.port}: {self.replicas} prefill replicas need ports between 1 and "
                "65535"
            )


@dataclass(frozen=True)
class Plan:
    config: Config = field(default_factory=Config)
    ray: RayConfig = field(default_factory=RayConfig)
    prefill: PrefillConfig | None = None

    def __post_init__(self) -> None:
        if self.config.peers.role != "alone":
            raise ConfigError(
                f"role is {self.config.peers.role}: a deployment chooses roles and addresses by "
                "itself; remove role, peer and peer-listen, and add a section [prefill]"
            )
        if self.config.server.keep_alive is not None:
            raise ConfigError(
                f"keep_alive is {self.config.server.keep_alive!r}: a replica keeps its model "
                "loaded; remove it"
            )
        if self.config.server.port == 0:
            raise ConfigError("port is 0: Ray's proxies need a port that clients know")
        if self.has_several:
            for option, section in OF_ONE_SERVER.items():
                value = getattr(getattr(self.config, section), option)
                if value is not None:
                    raise ConfigError(
                        f"{option} is {value!r} and there may be several replicas on a machine, "
                        "which cannot share it: remove it"
                    )
        if self.prefill is not None:  # what its replicas would refuse is refused here
            self.prefill_config(0, "192.0.2.1")
            self.decode_config((self.peer_address(0, "192.0.2.1"),))

    @property
    def has_several(self) -> bool:
        return self.ray.max_replicas > 1 or self.prefill is not None

    @property
    def replica_config(self) -> Config:
        """Several replicas store no responses and no batches: a client's next request may reach
        another one."""
        if not self.has_several:
            return self.config
        server = dataclasses.replace(self.config.server, stored_responses=0, batch_bytes=0)
        return dataclasses.replace(self.config, server=server)

    def peer_address(self, rank: int, machine: str) -> str:
        """Of a prefill replica. Without a secret and a certificate, on its machine alone."""
        assert self.prefill is not None
        port = self.prefill.port + rank
        if self.config.peers.peer_secret_file is None:
            return f"tcp://127.0.0.1:{port}"
        return f"tls://{f'[{machine}]' if ':' in machine else machine}:{port}"

    def prefill_config(self, rank: int, machine: str) -> Config:
        address = self.peer_address(rank, machine)
        return self._with_peers(role="prefill", peer_listen=address)

    def decode_config(self, addresses: tuple[str, ...]) -> Config:
        return self._with_peers(role="decode", peer=addresses, peer_cert=None, peer_key=None)

    def _with_peers(self, **changes: Any) -> Config:
        peers: PeersConfig = dataclasses.replace(self.config.peers, **changes)
        return dataclasses.replace(self.replica_config, peers=peers)


def _differing(value: Any, default: Any) -> Any:
    """What differs from a default, as JSON has them."""
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value
    return {k: _differing(v, default[k]) for k, v in value.items() if v != default[k]}


T = TypeVar("T", RayConfig, PrefillConfig)


def read_plan(path: Path) -> Plan:
    settings = read_config_file(path, KEYS, TABLES)
    tables = {setting.name: setting for setting in settings if setting.name in TABLES}
    ray_table, prefill_table = tables.get("ray"), tables.get("prefill")
    return Plan(
        _config([setting for setting in settings if setting.name not in TABLES]),
        RayConfig() if ray_table is None else _section(ray_table, RayConfig),
        None if prefill_table is None else _section(prefill_table, PrefillConfig),
    )


def _config(settings: list[Setting]) -> Config:
    """As `pippin serve` reads them, or the error that it would report."""
    for setting in settings:
        if setting.name == MODELS:
            raise ConfigError(
                f"{setting.place}: a deployment serves one model: write it as model = and remove "
                "[models]"
            )
        if setting.name in SECRETS:
            raise ConfigError(
                f"{setting.place}: Ray's dashboard and logs would show {setting.name}: write it "
                f"into a file of its own on every machine and set {setting.name}-file"
            )
    return parse_serve((), [source_of(setting) for setting in settings])


def _section(setting: Setting, kind: type[T]) -> T:
    table: Any = setting.value
    where = f"{setting.place}: section [{setting.name}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{setting.place}: {setting.name} is a section: write [{setting.name}]")
    known = [option_name(field.name) for field in dataclasses.fields(kind)]
    for key in table:
        if option_name(key) not in known:
            meant = near_name(option_name(key), known, f"it has {', '.join(known)}")
            raise ConfigError(f"{where} has no {key}; {meant}")
    try:
        return msgspec.convert({key.replace("-", "_"): table[key] for key in table}, kind)
    except msgspec.ValidationError as error:  # also of a ConfigError: its checks run inside
        raise ConfigError(f"{where}: {error}") from error


# Ray's public name of it, ray.serve.llm.request_router, cannot be imported without vLLM or SGLang.
PREFIX_ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
    ".PrefixCacheAffinityRouter"
)
MAX_ROUTER_CHARS = 16_000_000  # of prompts, for each replica; the oldest are forgotten
STOP_SECONDS = 10  # what an engine takes to stop, at most
MAX_INGRESS_REQUESTS = 1024


def deployment_options(plan: Plan) -> dict[str, dict[str, Any]]:
    """By deployment, what `serve.deployment` takes."""
    ray = plan.ray
    stop_s = plan.config.server.drain_timeout + STOP_SECONDS
    options: dict[str, dict[str, Any]] = {
        "ingress": {
            "name": "ingress",
            "num_replicas": ray.ingress_replicas,
            "max_ongoing_requests": MAX_INGRESS_REQUESTS,
            "ray_actor_options": {"num_cpus": 0},
            "graceful_shutdown_timeout_s": stop_s,
        },
        "engine": {
            "name": "engine",
            "autoscaling_config": {
                "min_replicas": ray.min_replicas,
                "max_replicas": ray.max_replicas,
                "target_ongoing_requests": ray.target_ongoing_requests,
            },
            "max_ongoing_requests": ray.max_ongoing_requests,
            "ray_actor_options": {"num_cpus": ray.num_cpus, "num_gpus": ray.num_gpus},
            "graceful_shutdown_timeout_s": stop_s,
            "request_router_config": {
                "request_router_class": PREFIX_ROUTER,
                "request_router_kwargs": {
                    "imbalanced_threshold": ray.max_imbalance,
                    "do_eviction": True,
                    "eviction_threshold_chars": MAX_ROUTER_CHARS,
                    "eviction_target_chars": MAX_ROUTER_CHARS * 9 // 10,
                },
            },
        },
    }
    if plan.prefill is not None:
        options["prefill"] = {
            "name": "prefill",
            "num_replicas": plan.prefill.replicas,
            "ray_actor_options": {
                "num_cpus": plan.prefill.num_cpus,
                "num_gpus": plan.prefill.num_gpus,
            },
            "graceful_shutdown_timeout_s": stop_s,
        }
    return options


def serve_config(plan: Plan) -> dict[str, Any]:
    """For `serve deploy`, and for the RayService of KubeRay."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": plan.config.server.host, "port": plan.config.server.port},
        "applications": [
            {
                "name": plan.ray.name,
                "route_prefix": "/",
                "import_path": "pippin_ray.application:build",
                "args": _differing(msgspec.to_builtins(plan), msgspec.to_builtins(Plan())),
            }
        ],
    }


deploy = App(name="deploy")


@deploy.command
def ray(
    file: Path,
    *,
    address: str = "auto",
    dry_run: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Run replicas of an engine on Ray Serve, with autoscaling and Ray's prefix-aware router.

    Requires `pip install 'pippin[ray]'` and a Ray cluster: `ray start --head` starts one. Returns
    when the models are loaded; the deployment keeps running. `serve status` shows it, `serve
    shutdown` ends it. Values of PIPPIN_ variables and of pippin.toml are not used.

    Parameters
    ----------
    file
        TOML: options of `pippin serve` by their names, and sections [ray] and [prefill].
    address
        Address of the cluster. `auto`: the one on this machine, or that of RAY_ADDRESS.
    dry_run
        Check the file and print it as a config for `serve deploy`. Starts nothing, needs no Ray.
    """
    plan = read_plan(file)
    if dry_run:
        print(json.dumps(serve_config(plan), indent=2))
        return
    url = run_on_ray(plan, address)
    print(f"Serving at {url}. `serve status` shows the deployment, `serve shutdown` ends it.")


class DeployError(PippinError):
    """The deployment cannot be started."""


def run_on_ray(plan: Plan, address: str) -> str:
    """Returns when all replicas have loaded their model; the URL. They keep running."""
    if find_spec("ray") is None:
        raise DeployError("Ray is not installed: run pip install 'pippin[ray]'")
    import ray
    from ray import serve

    from pippin_ray.application import build

    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise DeployError(
            f"no Ray cluster at {address}: {error}; start one with `ray start --head`, or give "
            "the address of another one with --address"
        ) from error
    config = serve_config(plan)
    application = config["applications"][0]
    serve.start(proxy_location=config["proxy_location"], http_options=config["http_options"])
    try:
        serve.run(
            build(application["args"]),
            name=application["name"],
            route_prefix=application["route_prefix"],
        )
    except RuntimeError as error:
        raise DeployError(f"the deployment failed; `serve status` has more: {error}") from error
    host = plan.config.server.host
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{plan.config.server.port}"
