"""The engines of one model, one or several replicas: where requests go, and statuses as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import zip_longest
from typing import Any

from pippin.engine.engine_client import EngineClient, OpenRequest, Suspects, WatchEvent
from pippin.engine.kv_events import prompt_hashes
from pippin.errors import EngineDead, NotReady, Overloaded, RequestError
from pippin.messages import (
    Abort,
    Finish,
    FlushCache,
    GetCounters,
    GetNode,
    GetStatus,
    Question,
    Submit,
    TokenDelta,
)

SHARE = "_share"  # of time: the mean
QUOTIENTS = {"hit_rate": ("tokens_matched", "tokens_looked_up")}


def merged_status(statuses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers are summed, shares are means, lists of numbers are summed by position; other lists
    are joined, and of all else the first counts."""
    names = dict.fromkeys(name for status in statuses for name in status)
    merged = {
        name: _merged(name, [status[name] for status in statuses if name in status])
        for name in names
    }
    for name, (part, whole) in QUOTIENTS.items():
        if name in merged:
            merged[name] = merged[part] / max(merged[whole], 1)
    return merged


def _merged(name: str, values: list[Any]) -> Any:
    values = [value for value in values if value is not None]
    if all(isinstance(value, dict) for value in values) and values:
        return merged_status(values)
    if all(isinstance(value, list) for value in values) and values:
        if all(_is_number(each) for value in values for each in value):
            return [sum(each) for each in zip_longest(*values, fillvalue=0)]
        return [each for value in values for each in value]
    if all(map(_is_number, values)) and values:
        return sum(values) / len(values) if name.endswith(SHARE) else sum(values)
    return values[0] if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# What a copy elsewhere costs, in tokens computed for each of its own: those it evicts there, of
# prompts that come back as well, and which evict others then.
HOME_WORTH = 3

logger = logging.getLogger(__name__)


class EnginePool:
    def __init__(self, num_replicas: int = 1) -> None:
        self.draining = False
        self._suspects = Suspects()
        self._places: dict[str, EngineClient] = {}  # of open requests, by id
        self._restarting: asyncio.Task[None] | None = None
        self.replicas = [
            EngineClient(self._suspects, self._route_again) for _ in range(num_replicas)
        ]

    # ---- what the API asks for -----------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return self.reason is None

    @property
    def reason(self) -> str | None:
        """Why the engine is not healthy."""
        for replica in self.replicas:
            if replica.reason is None:
                return None
        return self.replicas[0].reason

    def check_ready(self) -> None:
        """Raise NotReady unless new requests are taken."""
        if self.draining:
            raise NotReady("the server is shutting down")
        if (reason := self.reason) is not None:
            raise NotReady(reason)

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        self.check_ready()
        self._suspects.check(submit)
        assert submit.id not in self._places, f"request id {submit.id} is in use"
        hashes = prompt_hashes(submit.tokens, submit.salt) if len(self.replicas) > 1 else []
        request = OpenRequest(submit, hashes)
        self._place(request)
        try:
            while True:
                delta = await request.deltas.get()
                if request.num_to_compute and (replica := self._places.get(submit.id)):
                    replica.computed(request)
                if delta.finish is not None:
                    if (replica := self._places.pop(submit.id, None)) is not None:
                        replica.forget(submit.id)
                    if delta.finish in ("stop", "length"):
                        self._suspects.finished(submit)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self.abort(submit.id)

    def abort(self, id: str) -> None:
        """The client disconnected. Unknown and finished ids are ignored."""
        if (replica := self._places.pop(id, None)) is not None:
            replica.leave(Abort(id))

    def finish(self, id: str) -> None:
        if (replica := self._places.pop(id, None)) is not None:
            replica.leave(Finish(id))

    async def status(self) -> dict[str, Any]:
        _, statuses = await self._ask_each(GetStatus)
        if len(self.replicas) == 1:
            return statuses[0]
        return merged_status(statuses) | {"replicas": [*map(_summary, self.replicas)]}

    async def counters(self) -> dict[str, Any]:
        """The sums, and in `replicas` those of each replica; None for one that does not answer."""
        answering, counters = await self._ask_each(GetCounters)
        if len(self.replicas) == 1:
            return counters[0]
        known = dict(zip(answering, counters, strict=True))
        of_each = [known.get(replica) or None for replica in self.replicas]
        return merged_status(counters) | {"replicas": of_each}

    async def flush_cache(self) -> dict[str, Any]:
        """One that is not healthy has lost its cache in memory already."""
        return merged_status((await self._ask_each(FlushCache))[1])

    def watch(self, replica: int = 0) -> AsyncGenerator[WatchEvent, None]:
        """What the engine does, from now on and over its restarts; Overloaded if too many watch."""
        return self._replica(replica).watchers.watch()

    async def node(self, node: int, replica: int = 0) -> dict[str, Any]:
        """The tokens of a node that watchers were sent; {} if there is none."""
        return await self._replica(replica).ask(lambda id: GetNode(id, node))

    def restart(self) -> None:
        """Begin to replace replicas one after another; RequestError if there is only one."""
        if len(self.replicas) == 1:
            raise RequestError(
                "there is one engine, and requests would be refused while it restarts: start the "
                "server with --replicas 2 or more"
            )
        if self._restarting is not None and not self._restarting.done():
            raise Overloaded("the replicas are being restarted already: wait until that is done")
        self._restarting = asyncio.create_task(self._restart_all())

    # ---- the end -------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return sum(replica.num_open for replica in self.replicas)

    def drain(self) -> None:
        """Refuse new requests. `drained` waits for the open ones to end."""
        if self._restarting is not None:
            self._restarting.cancel()
        self.draining = True
        for replica in self.replicas:
            replica.draining = True

    async def drained(self) -> None:
        for replica in self.replicas:
            await replica.drained()

    def close(self) -> None:
        """There will be no engine any more: everything ends."""
        self.drain()
        for replica in self.replicas:
            replica.close()

    # --------------------------------------------------------------------------------------------

    def _place(self, request: OpenRequest) -> None:
        replica = self._places[request.submit.id] = self._choose(request.hashes)
        replica.open(request)

    def _choose(self, hashes: list[int]) -> EngineClient:
        """By the tokens that need not be computed there, and those that need no copy elsewhere,
        less its load; then the least loaded; then the least cached."""
        if len(self.replicas) == 1:
            return self.replicas[0]
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

    def _route_again(self) -> None:
        """What waits at replicas that do not serve, to those that do."""
        serving = [replica for replica in self.replicas if replica.serves]
        for replica in self.replicas if serving else ():
            if replica not in serving:
                for request in replica.release_unsent():
                    self._place(request)

    def _replica(self, number: int) -> EngineClient:
        count = len(self.replicas)
        if not 0 <= number < count:
            numbers = "0" if count == 1 else f"0 to {count - 1}"
            raise RequestError(f"replica is {number}: use {numbers}", param="replica")
        return self.replicas[number]

    async def _ask_each(
        self, question: Callable[[str], Question]
    ) -> tuple[list[EngineClient], list[dict[str, Any]]]:
        """The healthy replicas and their answers: {} for one that is lost meanwhile, unless all
        are. Raises NotReady if there is none."""
        if len(self.replicas) == 1:
            return self.replicas, [await self.replicas[0].ask(question)]
        if self.reason is not None:
            raise NotReady(self.reason)
        healthy = [replica for replica in self.replicas if replica.healthy]
        answers = [replica.ask(question) for replica in healthy]
        found = await asyncio.gather(*answers, return_exceptions=True)
        lost = [each for each in found if isinstance(each, BaseException)]
        for error in lost:
            if not isinstance(error, EngineDead | NotReady) or len(lost) == len(found):
                raise error
        return healthy, [{} if isinstance(each, BaseException) else each for each in found]

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


def _summary(replica: EngineClient) -> dict[str, Any]:
    return {
        "state": replica.state,
        "open_requests": replica.num_open,
        "tokens_to_compute": replica.num_to_compute,
        "restorable_prefixes": len(replica.prefixes),
    }
