"""What deploy/ says of Pippin is true: routes, ports, options, files, and how long a stop takes.
The linters of Docker, Compose and Kubernetes check the rest."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api.scripted_engine import ScriptedEngine, answer_anything, serving
from builders import make_loop
from pippin import __version__, cli
from pippin.config import ModelConfig, ServerConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
FOLDERS = ("base", "gpu", "routed", "routed/replica-1", "routed/replica-2")
ENGINE_STOP_S = 10  # docs/operations/reliability.md: 8.7 s, and another second


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def container(name: str) -> dict[str, Any]:
    found: dict[str, Any] = load(name)["spec"]["template"]["spec"]["containers"][0]
    return found


COMPOSE = load("compose.yaml")["services"]
REPLICAS = {name: service for name, service in COMPOSE.items() if name.startswith("replica")}
POD = load("kubernetes/base/deployment.yaml")["spec"]["template"]
SERVER = container("kubernetes/base/deployment.yaml")


def variables(dockerfile: str) -> dict[str, str]:
    text = (DEPLOY / dockerfile).read_text(encoding="utf-8").replace("\\\n", " ")
    line = re.search(r"^ENV (.*)$", text, re.MULTILINE)
    assert line is not None
    return dict(word.split("=") for word in line[1].split())


def parsed(
    words: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> tuple[ModelConfig, ServerConfig]:
    """What `pippin serve` reads of the command and the environment of a container."""
    for name, value in environment.items():
        if name.startswith("PIPPIN_"):
            monkeypatch.setenv(name, value)
    _, bound, _ = cli.app.parse_args(["serve", *words], exit_on_error=False, print_error=False)
    given = bound.arguments
    return given.get("model", ModelConfig()), given.get("server", ServerConfig())


def status(
    config: ServerConfig, path: str, headers: dict[str, str], reason: str | None = None
) -> int:
    """`reason`: why there is no engine."""
    engine = ScriptedEngine(answer_anything)
    engine.numbers = make_loop().counters()
    engine.reason = reason
    with serving(engine, config) as url:
        return httpx.get(f"{url}{path}", headers=headers).status_code


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_an_image_listens_where_it_is_probed_and_requires_keys(
    dockerfile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DEPLOY / dockerfile).read_text(encoding="utf-8")
    options = cli.app["serve"].assemble_argument_collection()
    known = {name for option in options for name in option.names}
    environment = variables(dockerfile)
    named = [name for name in environment if name.startswith("PIPPIN_")]
    spelled = [f"--{name.removeprefix('PIPPIN_').lower().replace('_', '-')}" for name in named]
    assert set(spelled) <= known
    _, server = parsed([], environment, monkeypatch)
    assert server.host == "0.0.0.0"
    assert server.api_key_file == "/run/secrets/api_key"
    assert f"\nEXPOSE {server.port}\n" in text
    probed = re.search(rf"http://127\.0\.0\.1:{server.port}(/\w+)'", text)
    assert probed is not None
    assert status(ServerConfig(api_key=("k",)), probed[1], {}) == 200
    assert re.search(r"^USER [1-9]\d*$", text, re.MULTILINE)
    assert 'ENTRYPOINT ["pippin", "serve"]' in text


@pytest.mark.parametrize("name", sorted(REPLICAS))
def test_a_replica_answers_the_router_and_prometheus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's probes have the name of the service as their Host, and no key."""
    monkeypatch.chdir(tmp_path)
    words = [word.replace("${PIPPIN_MODEL:-", "").rstrip("}") for word in REPLICAS[name]["command"]]
    _, server = parsed(words, variables("Dockerfile"), monkeypatch)
    router = COMPOSE["router"]["command"]
    address = f"{name}:{server.port}"
    assert f"http://{address}" in router
    probe = next(
        word.split("=")[1] for word in router if word.startswith("--health-check-endpoint=")
    )
    job = load("prometheus.yml")["scrape_configs"][0]
    assert address in job["static_configs"][0]["targets"]
    served = ServerConfig(api_key=("k",), allowed_host=server.allowed_host)
    assert status(served, probe, {"Host": address}) == 200
    key = {"Authorization": "Bearer k"}
    assert status(served, job["metrics_path"], {"Host": address, **key}) == 200


def test_kubernetes_probes_routes_of_the_server_and_its_command_parses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = variables("Dockerfile") | {
        entry["name"]: entry["value"] for entry in SERVER["env"]
    }
    for words in (SERVER["args"], container("kubernetes/gpu/deployment.yaml")["args"]):
        model, server = parsed(words, environment, monkeypatch)
        assert model.model == words[0]
    assert server.api_key_file is not None
    mounts = [mount["mountPath"] for mount in SERVER["volumeMounts"]]
    assert str(Path(server.api_key_file).parent) in mounts
    assert SERVER["ports"][0]["containerPort"] == server.port
    served = ServerConfig(api_key=("k",))
    probes = {kind: SERVER[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")}
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    # While a server drains, /health is 200 and /ready is not.
    assert (paths["startup"], paths["readiness"]) == ("/health", "/ready")
    assert {status(served, path, {}) for path in paths.values()} == {200}
    assert status(served, paths["liveness"], {}, reason="the engine is loaded again") == 200
    assert status(served, paths["readiness"], {}, reason="the engine is loaded again") == 503
    notes = POD["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(server.port)
    key = {"Authorization": "Bearer k"}
    assert status(served, notes["prometheus.io/path"], key) == 200


@pytest.mark.parametrize("number", [1, 2])
def test_the_router_in_kubernetes_reaches_each_server_by_a_name_that_it_allows(number: int) -> None:
    router = container("kubernetes/routed/router.yaml")
    *options, first, second = router["args"]
    assert options == COMPOSE["router"]["command"][:-2]
    name = (first, second)[number - 1].removeprefix("http://")
    replica = load(f"kubernetes/routed/replica-{number}/kustomization.yaml")
    service = load("kubernetes/base/service.yaml")
    served = f"{service['metadata']['name']}{replica['nameSuffix']}"
    assert name == f"{served}:{service['spec']['ports'][0]['port']}"
    (patch,) = replica["patches"]
    added = yaml.safe_load(patch["patch"])
    assert [change["value"] for change in added] == ["--allowed-host", served]
    assert patch["target"]["name"] == load("kubernetes/base/deployment.yaml")["metadata"]["name"]
    mount = next(one for one in router["volumeMounts"] if one["name"] == "api-key")
    assert f"$(head -n 1 {mount['mountPath']})" in (DEPLOY / "Dockerfile.router").read_text()
    key = load("kubernetes/base/deployment.yaml")["spec"]["template"]["spec"]["volumes"][-1]
    assert load("kubernetes/routed/router.yaml")["spec"]["template"]["spec"]["volumes"][-1] == key


def test_no_variable_of_a_kubernetes_service_is_read_as_an_option() -> None:
    """A Service named pippin would set PIPPIN_PORT=tcp://10.0.0.1:8000 in each container."""
    assert load("kubernetes/base/service.yaml")["metadata"]["name"] == "pippin"
    assert POD["spec"]["enableServiceLinks"] is False


def test_a_server_has_the_time_to_drain_and_to_stop() -> None:
    needed = ServerConfig().drain_timeout + ENGINE_STOP_S
    for replica in REPLICAS.values():
        assert int(replica["stop_grace_period"].removesuffix("s")) >= needed
    before = int(SERVER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] >= before + needed


def test_files_that_are_mounted_or_built_from_exist() -> None:
    for service in COMPOSE.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), source
        if "build" in service:
            built = service["build"]
            assert (DEPLOY / built["context"] / built["dockerfile"]).is_file()
    for folder in FOLDERS:
        kustomization = load(f"kubernetes/{folder}/kustomization.yaml")
        patches = kustomization.get("patches", ())
        named = [*kustomization["resources"], *(p["path"] for p in patches if "path" in p)]
        assert [n for n in named if not (DEPLOY / "kubernetes" / folder / n).exists()] == []


def test_every_image_has_a_version_and_ours_is_this_one() -> None:
    images = [service["image"] for service in COMPOSE.values()] + [SERVER["image"]]
    for dockerfile in DEPLOY.glob("Dockerfile*"):
        images += re.findall(r"^FROM (\S+)", dockerfile.read_text(), re.MULTILINE)
    for folder in FOLDERS:
        changed = load(f"kubernetes/{folder}/kustomization.yaml").get("images", ())
        images += [f"{image['newName']}:{image['newTag']}" for image in changed]
    assert [image for image in images if not re.search(r":v?\d+\.\d+\.\d+", image)] == []
    ours = {image for image in images if image.startswith("pippin:")}
    assert ours == {f"pippin:{__version__}", f"pippin:{__version__}-cuda"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "gpu", "routed"])
def test_kustomize_puts_each_folder_together(folder: str) -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [(each["kind"], each["metadata"]["name"]) for each in yaml.safe_load_all(built)]
    assert len(set(found)) == len(found)
    assert {kind for kind, _ in found} == {"Service", "PersistentVolumeClaim", "Deployment"}
