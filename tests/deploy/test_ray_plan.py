"""The file of `pippin deploy ray`: what it says, what is refused, and what Ray Serve is given."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from cli.commands import error_of, output_of
from pippin.config import Config
from pippin_ray.plan import (
    PREFIX_ROUTER,
    Plan,
    RayConfig,
    deployment_options,
    read_plan,
    serve_config,
)

TWO = """
model = "stories-hybrid-20m"
port = 9000
max-running = 8
alias = ["gpt-4o", "gpt-5"]

[ray]
min-replicas = 2
max-replicas = 4
num-gpus = 0.5
"""
PREFILL = TWO + "[prefill]\nreplicas = 2\nport = 7100\n"
TLS = 'peer-secret-file = "s"\npeer-cert = "c"\npeer-key = "k"\npeer-ca = "a"\n'
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.toml"
    path.write_text(text)
    return path


def test_options_of_serve_and_of_the_deployment_are_read(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, TWO))
    assert (plan.config.server.port, plan.config.engine.max_running) == (9000, 8)
    assert plan.config.server.alias == ("gpt-4o", "gpt-5")
    assert (plan.ray.min_replicas, plan.ray.max_replicas, plan.ray.num_gpus) == (2, 4, 0.5)
    assert plan.prefill is None
    assert type(plan.config.server) is type(Config().server)


def test_variables_and_other_files_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPPIN_PORT", "7")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pippin.toml").write_text("max-running = 3")
    plan = read_plan(write(tmp_path, "[ray]"))
    assert plan == Plan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-runing = 8", ":1: max-runing is not an option of `pippin serve`; did you mean max-r"),
        ("max-running = 'x'", "unable to convert"),
        ("\n[ray]\nmax-replica = 2", ":2: section [ray] has no max-replica; did you mean max-rep"),
        ("[ray]\nspeed = 2", "section [ray] has no speed; it has name, min-replicas"),
        ("[ray]\nmin-replicas = 'x'", "section [ray]: Expected `int`, got `str`"),
        ("[ray]\nmin-replicas = 2", "max_replicas is 1, less than min_replicas 2: raise it"),
        ("[ray]\nmin-replicas = 0", "min_replicas must be at least 1, got 0"),
        ("[ray]\ntarget-ongoing-requests = 0", "target_ongoing_requests must be more than 0"),
        ("[ray]\nname = 'a#b'", "name is 'a#b': use a name without #"),
        ("[prefill]\nport = 65535\nreplicas = 2", "port is 65535: 2 prefill replicas need"),
        ("[rayy]", ":1: section [rayy] is not known: there are [ray] and [prefill]"),
        ("ray = 3", ":1: ray is a section: write [ray]"),
        ("port = 0", "port is 0: Ray's proxies need a port"),
        ("role = 'decode'\npeer = ['tcp://127.0.0.1:7']", "role is decode: a deployment chooses"),
        ("cache-dir = 'd'\ndisk = '1GB'\n[ray]\nmax-replicas = 2", "cache_dir is 'd' and there"),
        ("kv-events = 'tcp://*:5557'\n[prefill]", "kv_events is 'tcp://*:5557' and there may be"),
        ("peer-secret-file = 's'\n[prefill]", "give --peer-cert and --peer-key"),
        ("api-key = 'k'", "set api-key-file"),
        ("keep-alive = '5m'", "keep_alive is '5m': a replica keeps its model loaded"),
        ("[models.a]", ":1: a deployment serves one model: write it as model ="),
        ("port = [", "Invalid value"),
    ],
)
def test_a_mistake_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text)
    path.chmod(0o600)
    _, error = error_of(capsys, "deploy", "ray", str(path), "--dry-run")
    assert message in error


def test_a_file_that_is_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, error = error_of(capsys, "deploy", "ray", str(tmp_path / "no.toml"))
    assert (status, "cannot read" in error) == (2, True)


def test_without_ray_the_error_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin_ray.plan.find_spec", lambda _: None)
    status, error = error_of(capsys, "deploy", "ray", str(write(tmp_path, TWO)))
    assert (status, error) == (
        1,
        "pippin: Ray is not installed: run pip install 'pippin[ray]'",
    )


@pytest.mark.parametrize("text", ["[ray]", TWO, PREFILL, TLS + PREFILL])
def test_a_dry_run_prints_a_serve_config_that_means_the_same(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, text)
    printed = json.loads(output_of(capsys, "deploy", "ray", str(path), "--dry-run"))
    plan = read_plan(path)
    (application,) = printed["applications"]
    assert msgspec.convert(application["args"], Plan) == plan
    assert printed["http_options"]["port"] == plan.config.server.port
    assert application["import_path"] == "pippin_ray.application:build"


def test_several_replicas_store_nothing_that_a_client_asks_for_later() -> None:
    one, two = Plan(), Plan(ray=RayConfig(max_replicas=2))
    assert one.replica_config == one.config
    server = two.replica_config.server
    assert (server.stored_responses, server.batch_bytes) == (0, 0)


def test_prefill_replicas_listen_one_port_after_another_and_engines_ask_all(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, PREFILL))
    prefill = plan.prefill_config(1, "10.0.0.7").peers
    assert (prefill.role, prefill.peer_listen) == ("prefill", "tcp://127.0.0.1:7101")
    decode = plan.decode_config(("tcp://127.0.0.1:7100", "tcp://127.0.0.1:7101"))
    assert (decode.peers.role, len(decode.peers.peer)) == ("decode", 2)
    assert decode.server.stored_responses == 0


def test_with_a_secret_prefill_replicas_listen_on_their_machines_address(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, TLS + PREFILL))
    listening = plan.prefill_config(0, "10.0.0.7").peers
    assert (listening.peer_listen, listening.peer_cert) == ("tls://10.0.0.7:7100", "c")
    assert plan.peer_address(1, "fd00::7") == "tls://[fd00::7]:7101"
    asking = plan.decode_config((listening.peer_listen or "",)).peers
    assert (asking.peer_ca, asking.peer_cert, asking.peer_key) == ("a", None, None)


def test_ray_is_given_the_replicas_their_resources_and_its_prefix_router(tmp_path: Path) -> None:
    options = deployment_options(read_plan(write(tmp_path, PREFILL)))
    engine = options["engine"]
    assert engine["autoscaling_config"]["min_replicas"] == 2
    assert engine["autoscaling_config"]["max_replicas"] == 4
    assert engine["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0.5}
    assert engine["request_router_config"]["request_router_class"] == PREFIX_ROUTER
    assert engine["request_router_config"]["request_router_kwargs"]["do_eviction"] is True
    assert options["prefill"]["num_replicas"] == 2
    drained = Config().server.drain_timeout
    assert all(one["graceful_shutdown_timeout_s"] > drained for one in options.values())


@needs_ray
@pytest.mark.filterwarnings("ignore")  # of Ray's own imports
def test_ray_takes_these_options_and_this_config(tmp_path: Path) -> None:
    serve = import_module("ray.serve")
    plan = read_plan(write(tmp_path, PREFILL))
    for options in deployment_options(plan).values():
        inspect.signature(serve.deployment).bind(**options)
    kwargs = deployment_options(plan)["engine"]["request_router_config"]["request_router_kwargs"]
    module, _, name = PREFIX_ROUTER.rpartition(".")
    router = getattr(import_module(module), name)
    inspect.signature(router.initialize_state).bind(None, **kwargs)
    schema = import_module("ray.serve.schema").ServeDeploySchema
    assert schema.model_validate(serve_config(plan)).applications[0].name == "pippin"
    build = import_module("pippin_ray.application").build
    assert build(serve_config(plan)["applications"][0]["args"])._bound_deployment.name == "ingress"
