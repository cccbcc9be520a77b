"""The statuses of several engines as one. Knows no field of a status but those that are no sums."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pippin.engine.engine_client import (
    EngineClient,
    OpenRequest,
    Sender,
    Suspects,
    WatchEvent,
    check_replica,
)
from pippin.engine.kv_events import BLOCK_TOKENS, prompt_hashes
from pippin.errors import EngineDead, NotReady, Overloaded
from pippin.messages import Delivered, RestorablePrefixes, Shutdown, Submit, TokenDelta

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


MAX_PREFIXES = 1 << 18  # of 64 tokens each: 16 million tokens, in some 30 MB


class PrefixIndex:
    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        """Of more prefixes, those that are reported later are not known."""
        self._max_prefixes = max_prefixes
        self._reported: dict[int, int] = {}  # hash: in how many tiers
        self._expected: dict[int, int] = {}  # hash: by how many prompts
        self._sent: OrderedDict[int, None] = OrderedDict()  # hashes, the latest last

    def __len__(self) -> int:
        return len(self._reported)

    def change(self, message: RestorablePrefixes) -> None:
        if message.cleared:
            self._reported.clear()
        room = self._max_prefixes
        for hash in message.stored:
            if hash in self._reported or len(self._reported) < room:
                _count(self._reported, hash, 1)
        for hash in message.removed:
            _count(self._reported, hash, -1)

    def clear(self) -> None:
        """The engine is lost; prompts that it computes are dropped one by one."""
        self._reported.clear()
        self._sent.clear()

    def expect(self, hashes: Iterable[int]) -> None:
        for hash in hashes:
            _count(self._expected, hash, 1)
            self._sent[hash] = None
            self._sent.move_to_end(hash)
        while len(self._sent) > self._max_prefixes:
            self._sent.popitem(last=False)

    def drop(self, hashes: Iterable[int]) -> None:
        for hash in hashes:
            _count(self._expected, hash, -1)

    def restorable_tokens(self, hashes: Sequence[int]) -> int:
        """Of a prompt whose blocks have these hashes."""
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._reported or hashes[index] in self._expected:
                return (index + 1) * BLOCK_TOKENS
        return 0

    def home_tokens(self, hashes: Sequence[int]) -> float:
        """The memory that another replica would spend on a copy of what was sent here before.

        Also of what was evicted since: prompts that come back to one replica leave the memory of
        the others to other prompts. All prompts that share a block need one copy of it, so it is
        divided among this one and those that are open here.
        """
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._sent:
                known = hashes[: index + 1]
                return sum(BLOCK_TOKENS / (1 + self._expected.get(hash, 0)) for hash in known)
        return 0.0


def _count(counts: dict[int, int], hash: int, change: int) -> None:
    """A hash that is not known cannot become less."""
    count = counts.get(hash, 0) + change
    if count > 0:
        counts[hash] = count
    else:
        counts.pop(hash, None)


# What an open request weighs, in tokens of a prompt: it delays the steps of others, and its row
# takes memory from the cache. With less, one replica attracts most conversations, and evicts some.
ROW_TOKENS = 128


class Replica(EngineClient):
    def __init__(self, suspects: Suspects, on_change: Callable[[], None]) -> None:
        """`on_change`: its engine is ready, or lost."""
        super().__init__(suspects)
        self.prefixes = PrefixIndex()
        self.num_to_compute = 0  # tokens of prompts that have no reply yet
        self.is_resting = False  # requests are routed elsewhere, if there is another
        self.is_restarting = False  # requests wait for the next engine
        self._was_asked_to_exit = False
        self._on_change = on_change
        self._replaced = asyncio.Event()  # an engine is ready, or there will be none
        self.is_wanted = asyncio.Event()  # not set: its engine failed too often, and stays down
        self.is_wanted.set()

    @property
    def serves(self) -> bool:
        sender = self._sender
        return self.healthy and not self.is_restarting and sender is not None and sender.alive

    @property
    def load(self) -> int:
        """In tokens that prefill would compute in that time."""
        return self.num_to_compute + ROW_TOKENS * self.num_open

    @property
    def state(self) -> str:
        if self.is_restarting:
            return "restarting"
        if not self.healthy:
            return self.reason or "lost"
        return "draining" if self.is_resting else "serving"

    def forget(self, id: str) -> None:
        """Its reply has ended."""
        self._forget(id)

    def release_unsent(self) -> list[OpenRequest]:
        """Requests that no engine has, in order of arrival: they are another replica's now."""
        unsent = [request for request in self._requests.values() if not request.sent]
        for request in unsent:
            self._forget(request.submit.id)
        return unsent

    async def replace_engine(self) -> None:
        """Its requests end, then its engine exits and another is loaded.

        Raises EngineDead if engines failed to load until the supervisor gave up.
        """
        self.is_resting = True
        self.is_wanted.set()
        try:
            while self.num_open:
                await self.drained()
            self._replaced.clear()
            if self.healthy:
                self.is_restarting = self._was_asked_to_exit = True
                self._send(Shutdown())
            await self._replaced.wait()
        finally:
            self.is_resting = False
        if not self.is_wanted.is_set():
            raise EngineDead(self.reason or "")

    # ---- what a supervisor calls ---------------------------------------------------------------

    def engine_ready(self, sender: Sender) -> None:
        self.is_restarting = self._was_asked_to_exit = False
        super().engine_ready(sender)
        self._replaced.set()
        self._on_change()

    def exited_as_asked(self) -> bool:
        """Once: the engines that follow are to serve."""
        asked, self._was_asked_to_exit = self._was_asked_to_exit, False
        return asked

    def engine_lost(self, reason: str, *, knows_all: bool = False) -> None:
        self._replaced.clear()
        self.prefixes.clear()
        super().engine_lost(reason, knows_all=knows_all)
        self._on_change()

    def give_up(self, reason: str) -> None:
        """Its engine is not restarted until it is wanted."""
        self.is_wanted.clear()
        self.is_restarting = False
        self.reason = reason
        self._replaced.set()
        self._on_change()

    def deliver(self, message: Delivered) -> None:
        if isinstance(message, RestorablePrefixes):
            self.prefixes.change(message)
        else:
            super().deliver(message)

    def _submit(self, request: OpenRequest) -> None:
        if not self.is_restarting:
            super()._submit(request)


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
