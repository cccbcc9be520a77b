"""The plan as an application of Ray Serve. The only module that imports Ray.

Ray's HTTP proxies ──▶ ingress ──▶ engine: the replica with the longest prefix of the prompt,
                                      │    as far as the ingress sent it there
                                      ▼
                                   prefill (optional): computes prompts for the engines
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address
from starlette.types import ASGIApp, Message

from pippin.errors import LoadError
from pippin.startup.resolve import with_keys
from pippin_ray.forwarding import ForwardedRequest, Ingress, RayReplica
from pippin_ray.plan import Plan, deployment_options

PEERS_SECONDS = 1.0
REPLICA_HEADER = b"x-pippin-replica"
RAYS_HEADER = b"x-request-id"

log = logging.getLogger(__name__)


class EngineDeployment:
    """A replica of the engine. Ray calls `check_health` and, when it stops one, `__del__`."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, plan: Plan, prefill: DeploymentHandle | None = None
    ) -> None:
        config = plan.replica_config
        if prefill is not None:
            config = plan.decode_config(await _addresses(plan, prefill))
        self._replica = await RayReplica.start(config)

    async def respond(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        own = (REPLICA_HEADER, serve.get_replica_context().replica_id.unique_id.encode())
        async for message in self._replica.respond(request):
            if message["type"] == "http.response.start":  # Ray's proxy adds the id of the request
                kept = [pair for pair in message["headers"] if pair[0] != RAYS_HEADER]
                message["headers"] = [*kept, own]
            yield message

    async def check_health(self) -> None:
        self._replica.check()

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):
            await self._replica.close()


class PrefillDeployment(EngineDeployment):
    """An engine that computes prompts for the others. It receives no HTTP requests."""

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]
        self._machine = get_node_ip_address()
        rank = serve.get_replica_context().rank.rank
        self._address = plan.peer_address(rank, self._machine)
        self._replica = await RayReplica.start(plan.prefill_config(rank, self._machine))

    async def peer_address(self) -> tuple[str, str]:
        return self._machine, self._address


class IngressDeployment:
    def __init__(self, plan: Plan, engine: DeploymentHandle) -> None:
        self._plan = plan
        self._engine = engine.options(method_name="respond", stream=True)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        config = self._plan.config
        return Ingress(with_keys(config.server), config.limits, self._forward)

    async def _forward(self, request: ForwardedRequest) -> AsyncIterator[Message]:
        """Ray's prefix router reads positional arguments, and refuses one without a prompt."""
        if request.prompt:
            messages = self._engine.remote(request)
        else:
            messages = self._engine.remote(request=request)
        async for message in messages:
            yield message


async def _addresses(plan: Plan, prefill: DeploymentHandle) -> tuple[str, ...]:
    """Of all prefill replicas, when they have been started."""
    assert plan.prefill is not None
    own = get_node_ip_address()
    while True:
        found = await prefill.broadcast("peer_address").results_async()
        if len(found) >= plan.prefill.replicas:
            break
        log.info("waiting for prefill replicas: %d of %d", len(found), plan.prefill.replicas)
        await asyncio.sleep(PEERS_SECONDS)
    for machine, address in found:
        if address.startswith("tcp:") and machine != own:
            raise LoadError(
                f"a prefill replica is on {machine} and this one is on {own}: between machines "
                "peer-secret-file, peer-cert, peer-key and peer-ca are required"
            )
    return tuple(sorted(address for _, address in found))


def build(table: dict[str, Any]) -> Application:
    """What a Serve config file names as its `import_path`; `table` are its `args`."""
    plan = msgspec.convert(table, Plan)
    options = deployment_options(plan)
    ingress = serve.deployment(serve.ingress()(IngressDeployment), **options["ingress"])
    engine = serve.deployment(EngineDeployment, **options["engine"])
    if plan.prefill is None:
        return ingress.bind(plan, engine.bind(plan))
    prefill = serve.deployment(PrefillDeployment, **options["prefill"])
    return ingress.bind(plan, engine.bind(plan, prefill.bind(plan)))
