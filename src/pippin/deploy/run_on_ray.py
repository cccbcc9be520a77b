"""Runs a plan on a Ray cluster that is there: starts no cluster, and imports Ray when called."""

from __future__ import annotations

from importlib.util import find_spec

from pippin.deploy.plan import Plan
from pippin.deploy.serve_options import serve_config
from pippin.errors import PippinError


class DeployError(PippinError):
    """The deployment cannot be started."""


def run_on_ray(plan: Plan, address: str) -> str:
    """Returns when all replicas have loaded their model; the URL. They keep running."""
    if find_spec("ray") is None:
        raise DeployError("Ray is not installed: run pip install 'pippin[ray]'")
    import ray
    from ray import serve

    from pippin.deploy.ray_application import build

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
