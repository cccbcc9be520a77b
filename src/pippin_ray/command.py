"""`pippin deploy ray`. Imports Ray only to deploy."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from pippin.errors import PippinError
from pippin_ray.plan import Plan, read_plan, serve_config

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
