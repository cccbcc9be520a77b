"""Several engines of one model as one. Knows no text, no HTTP and no process.

    request ──▶ the replica that saves the most time and memory, less its load ──▶ its engine
    a replica's engine is lost: what no engine has is routed again, if another one serves

Which requests may be submitted again, and which are refused, is decided over all replicas alike
(`suspects.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from pippin.engine.clients.merged_status import merged_status
from pippin.engine.clients.replica import Replica
from pippin.engine.clients.replica_number import check_replica
from pippin.engine.clients.suspects import OpenRequest, Suspects
from pippin.engine.clients.watchers import WatchEvent
from pippin.engine.kv_events.block_hashes import prompt_hashes
from pippin.errors import EngineDead, NotReady, Overloaded
from pippin.messages import Submit, TokenDelta

# What a copy elsewhere costs, in tokens computed for each of its own: those it evicts there, of
# prompts that come back as well, and which evict others then.
HOME_WORTH = 3

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Route:
    """A request, and where it is."""

    request: OpenRequest
    hashes: list[int]  # of the whole blocks of its prompt
    replica: Replica | None = None
    num_to_compute: int = 0  # tokens of its prompt; 0 once its reply has begun

    def enter(self, replica: Replica) -> None:
        restorable = replica.prefixes.restorable_tokens(self.hashes)
        self.replica = replica
        self.num_to_compute = max(self.request.submit.prompt_len - restorable, 0)
        replica.num_to_compute += self.num_to_compute
        replica.prefixes.expect(self.hashes)

    def computed(self) -> None:
        if self.replica is not None:
            self.replica.num_to_compute -= self.num_to_compute
            self.num_to_compute = 0

    def leave(self) -> None:
        self.computed()
        if self.replica is not None:
            self.replica.prefixes.drop(self.hashes)
            self.replica = None


class EnginePool:
    def __init__(self, num_replicas: int) -> None:
        self._suspects = Suspects()
        self._routes: dict[str, Route] = {}
        self._restarting: asyncio.Task[None] | None = None
        self.replicas = [Replica(self._suspects, self._route_again) for _ in range(num_replicas)]

    # ---- what the API asks for -----------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return any(replica.healthy for replica in self.replicas)

    @property
    def reason(self) -> str | None:
        return None if self.healthy else self.replicas[0].reason

    @property
    def draining(self) -> bool:
        return any(replica.draining for replica in self.replicas)

    def check_ready(self) -> None:
        if self.draining:
            raise NotReady("the server is shutting down")
        if self.reason is not None:
            raise NotReady(self.reason)

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        self.check_ready()
        self._suspects.check(submit)
        assert submit.id not in self._routes, f"request id {submit.id} is in use"
        request = OpenRequest(submit)
        route = Route(request, prompt_hashes(submit.tokens, submit.salt))
        self._routes[submit.id] = route
        self._place(route)
        try:
            while True:
                delta = await request.deltas.get()
                route.computed()
                if delta.finish is not None and (replica := self._leave(submit.id)) is not None:
                    replica.forget(submit.id)
                if delta.finish in ("stop", "length"):
                    self._suspects.finished(submit)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self.abort(submit.id)

    def abort(self, id: str) -> None:
        if (replica := self._leave(id)) is not None:
            replica.abort(id)

    def finish(self, id: str) -> None:
        if (replica := self._leave(id)) is not None:
            replica.finish(id)

    async def status(self) -> dict[str, Any]:
        statuses = await self._of_each(*(replica.status() for replica in self._answering()))
        return merged_status(statuses) | {"replicas": [*map(_summary, self.replicas)]}

    async def counters(self) -> dict[str, Any]:
        """The sums, and in `replicas` those of each replica; None for one that does not answer."""
        answering = self._answering()
        counters = await self._of_each(*(replica.counters() for replica in answering))
        known = dict(zip(answering, counters, strict=True))
        of_each = [known.get(replica) or None for replica in self.replicas]
        return merged_status(counters) | {"replicas": of_each}

    async def flush_cache(self) -> dict[str, Any]:
        """One that is not healthy has lost its cache in memory already."""
        return merged_status(
            await self._of_each(*(replica.flush_cache() for replica in self._answering()))
        )

    def watch(self, replica: int = 0) -> AsyncGenerator[WatchEvent, None]:
        check_replica(replica, len(self.replicas))
        return self.replicas[replica].watch()

    async def node(self, node: int, replica: int = 0) -> dict[str, Any]:
        check_replica(replica, len(self.replicas))
        return await self.replicas[replica].node(node)

    def restart(self) -> None:
        if self._restarting is not None and not self._restarting.done():
            raise Overloaded("the replicas are being restarted already: wait until that is done")
        self._restarting = asyncio.create_task(self._restart_all())

    # ---- the end -------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return sum(replica.num_open for replica in self.replicas)

    def drain(self) -> None:
        """Refuse new requests. `drained` waits for the open ones to end."""
        self._end_restart()
        for replica in self.replicas:
            replica.drain()

    async def drained(self) -> None:
        for replica in self.replicas:
            await replica.drained()

    def close(self) -> None:
        """There will be no engine any more: everything ends."""
        self._end_restart()
        for replica in self.replicas:
            replica.close()

    # --------------------------------------------------------------------------------------------

    def _place(self, route: Route) -> None:
        replica = self._choose(route.hashes)
        route.enter(replica)
        replica.open(route.request)

    def _choose(self, hashes: list[int]) -> Replica:
        """By the tokens that need not be computed there, and those that need no copy elsewhere,
        less its load; then the least loaded; then the least cached."""
        serving = [replica for replica in self.replicas if replica.serves]
        awake = [replica for replica in serving if not replica.is_resting]
        return max(
            awake or serving or self.replicas,
            key=lambda replica: (
                replica.prefixes.restorable_tokens(hashes)
                + HOME_WORTH * replica.prefixes.home_tokens(hashes)
                - replica.load,
                -replica.load,
                -len(replica.prefixes),
            ),
        )

    def _leave(self, id: str) -> Replica | None:
        """The replica that had the request; None if it has ended."""
        route = self._routes.pop(id, None)
        if route is None:
            return None
        replica = route.replica
        route.leave()
        return replica

    def _route_again(self) -> None:
        """What waits at replicas that do not serve, to those that do."""
        if not any(replica.serves for replica in self.replicas):
            return
        for replica in self.replicas:
            if replica.serves:
                continue
            for request in replica.release_unsent():
                route = self._routes[request.submit.id]
                route.leave()
                self._place(route)

    def _answering(self) -> list[Replica]:
        """Raises NotReady if there is none."""
        if self.reason is not None:
            raise NotReady(self.reason)
        return [replica for replica in self.replicas if replica.healthy]

    async def _of_each(self, *answers: Any) -> list[dict[str, Any]]:
        """{} for an engine that is lost meanwhile, unless all are."""
        found = await asyncio.gather(*answers, return_exceptions=True)
        lost = [each for each in found if isinstance(each, BaseException)]
        for error in lost:
            if not isinstance(error, EngineDead | NotReady) or len(lost) == len(found):
                raise error
        return [{} if isinstance(each, BaseException) else each for each in found]

    async def _restart_all(self) -> None:
        for number, replica in enumerate(self.replicas):
            logger.warning("replica %d is restarted when its requests have ended", number)
            try:
                await replica.replace_engine()
            except EngineDead as error:
                reason = error.message
                logger.error(
                    "replica %d stays down, the others are not restarted: %s", number, reason
                )
                return
        logger.warning("all %d replicas were restarted", len(self.replicas))

    def _end_restart(self) -> None:
        if self._restarting is not None:
            self._restarting.cancel()


def _summary(replica: Replica) -> dict[str, Any]:
    return {
        "state": replica.state,
        "open_requests": replica.num_open,
        "tokens_to_compute": replica.num_to_compute,
        "restorable_prefixes": len(replica.prefixes),
    }
