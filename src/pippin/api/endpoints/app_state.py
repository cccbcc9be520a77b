"""What all endpoints share, and a request's way to its model: read, checked, waited for, leased."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pippin.api.batches.runner import Batches
from pippin.api.endpoints.metrics_endpoint import ServerMetrics
from pippin.api.http.access_control import Keys, client_of, owner_of, owner_salt_of
from pippin.api.http.answers import record_of
from pippin.api.http.read_body import SMALL_BYTES, BodyBudget, Workers, decode_body, read_body
from pippin.api.http.sending import in_time, unless_disconnected
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Leniency
from pippin.api.response_store import ResponseStores
from pippin.api.served_models import ModelLease, ServedModel, ServedModels, ServedText
from pippin.config import LimitsConfig, ServerConfig
from pippin.engine.engine_client import RequestEngine
from pippin.engine.engine_pool import EnginePool
from pippin.errors import NotReady
from pippin.text.bundle import SamplingDefaults
from pippin.text.tokenizer import Tokenizer

T = TypeVar("T")
PLACE_HEADER = "x-pippin-load-place"


class Runnable(Protocol):
    @property
    def leniency(self) -> Leniency: ...

    @property
    def timeout_s(self) -> float | None: ...

    def keep_apart(self, owner_salt: bytes) -> None: ...

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]: ...


R = TypeVar("R", bound=Runnable)


@dataclass
class AppState:
    models: ServedModels
    config: ServerConfig
    limits: LimitsConfig
    stored: ResponseStores
    use: Callable[[str, RequestEngine], RequestEngine]  # how requests use it, by a model's name
    batches: Batches = field(init=False)  # which have a state of their own for their lines
    metrics: ServerMetrics = field(init=False)
    workers: Workers = field(default_factory=Workers)
    downloads: set[str] = field(default_factory=set)  # one at a time: disk and network are shared

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.limits)
        self.keys = Keys(self.config)
        self.rules = RequestRules(  # for requests that no model reads
            self.models.default.info,
            SamplingDefaults(),
            self.limits,
            strict_fields=self.config.strict_fields,
        )

    def model_of(self, request: Request) -> ServedModel:
        """That `?model=` names, or the default."""
        return self.models.get(request.query_params.get("model"))

    def engine_of(self, request: Request) -> EnginePool:
        """Of that model; NotReady if it is not loaded."""
        model = self.model_of(request)
        if model.engine is None:
            state = model.residency.state
            raise NotReady(
                f"the model {model.info.name} is not loaded ({state}): send it a request first"
            )
        return model.engine

    async def read(self, request: Request, work: Callable[[Any, ServedText], T]) -> T:
        """The result of `work` on a request's JSON, in a thread. The model need not be loaded."""
        async with self._body(request) as body:
            return (await self._work(request, body, work))[2]

    async def read_json(self, request: Request, work: Callable[[Any], T]) -> T:
        """The same, of a request for no model."""
        async with self._body(request) as body:
            return await self.workers.run(lambda body: work(decode_body(body)), body)

    async def prepare(
        self, request: Request, work: Callable[[Any, ServedText], R]
    ) -> tuple[R, ModelLease]:
        """A request for the engine: what is wrong with it is found before its model loads. The
        model stays loaded until the reply has been sent."""
        self.models.check_ready()
        async with self._body(request) as body:
            entry, served, job = await self._work(request, body, work)
            lease = await self._lease(request, entry, job.timeout_s)
            if lease.served.model != served.model:  # it is known exactly since it was loaded
                loaded = lease.served
                job = await self.workers.run(lambda body: work(decode_body(body), loaded), body)
        job.keep_apart(owner_salt_of(request.scope))
        shown_with = lease.served.text.tokenizer if self.config.log_prompts else None
        record = record_of(request.scope)
        record.ignored = job.leniency.header()
        record.facts = lambda: job.facts(shown_with)
        return job, lease

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytearray]:
        """Counted against what all bodies may take, until it was read."""
        with self.bodies.claim(client_of(request.scope)) as claim:
            yield await read_body(request, self.limits, claim)

    async def _work(
        self, request: Request, body: bytearray, work: Callable[[Any, ServedText], T]
    ) -> tuple[ServedModel, ServedText, T]:
        """By the model that a body names; what it is decoded to is not kept."""
        is_small = len(body) <= SMALL_BYTES
        async with nullcontext() if is_small else self.workers.decoded(body):
            fields = decode_body(body) if is_small else await self.workers.run(decode_body, body)
            entry = self.models.of(fields)
            served = self._for_owner(request, await entry.served_text())
            return entry, served, await self.workers.run(lambda _: work(fields, served), body)

    async def _lease(
        self, request: Request, entry: ServedModel, timeout_s: float | None
    ) -> ModelLease:
        """Released when the reply has been sent. A client that disconnects gives up its place."""
        record = record_of(request.scope)
        lease = entry.lease_now()
        if lease is None:
            waiting = in_time(entry.lease(), timeout_s)
            lease = await unless_disconnected(request.receive, waiting)
        if lease is None:
            raise ClientDisconnect
        record.at_end.append(lease.release)
        if lease.place:
            record.headers[PLACE_HEADER] = str(lease.place)
        engine = self.use(entry.info.name, lease.engine)
        return replace(lease, engine=engine, served=self._for_owner(request, lease.served))

    def _for_owner(self, request: Request, served: ServedText) -> ServedText:
        owner = owner_of(request.scope)
        rules = replace(served.rules, limits=self.limits, owner=owner, stores=self.stored)
        return replace(served, rules=rules)


Handler = Callable[[AppState, Request], Awaitable[Response]]
