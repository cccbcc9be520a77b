"""What all endpoints share: the models, the limits, one pool of threads. Knows no route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request

from pippin.api.http.access_control import Admins, client_of, owner_salt_of
from pippin.api.http.read_body import BodyBudget, decode_body, read_body
from pippin.api.http.request_log import record_of
from pippin.api.http.sending import in_time, unless_disconnected
from pippin.api.http.workers import SMALL_BYTES, Workers
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.body import Leniency
from pippin.api.served_models import ModelLease, ServedModel, ServedModels, ServedText
from pippin.config import LimitsConfig, ServerConfig
from pippin.engine.engine_client import Engine
from pippin.errors import NotReady
from pippin.text.bundle import SamplingDefaults, TextBundle
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
J = TypeVar("J", bound=Runnable)


@dataclass(frozen=True)
class Prepared(Generic[R]):
    """A request that was read, whose model is loaded until its reply has been sent."""

    job: R
    engine: Engine
    served: ServedText
    entry: ServedModel
    waited_s: float  # for the model to be loaded

    def with_job(self, job: J) -> Prepared[J]:
        """The same, of a job whose type is known."""
        return Prepared(job, self.engine, self.served, self.entry, self.waited_s)

    @property
    def text(self) -> TextBundle:
        return self.served.text

    @property
    def model(self) -> ModelInfo:
        return self.served.model


@dataclass(frozen=True)
class AppState:
    models: ServedModels
    config: ServerConfig
    limits: LimitsConfig
    use: Callable[[ServedModel, Engine], Engine] = lambda _, engine: engine  # how requests do
    workers: Workers = field(default_factory=Workers)
    bodies: BodyBudget = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bodies", BodyBudget(self.limits))

    @property
    def rules(self) -> RequestRules:
        """For requests that no model reads."""
        return RequestRules(
            self.models.default.info,
            SamplingDefaults(),
            self.limits,
            strict_fields=self.config.strict_fields,
        )

    @property
    def admins(self) -> Admins:
        return Admins(self.config)

    def model_of(self, request: Request) -> ServedModel:
        """That `?model=` names, or the default."""
        return self.models.get(request.query_params.get("model"))

    def engine_of(self, request: Request) -> Engine:
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
        with self.bodies.claim(client_of(request.scope)) as claim:
            body = await read_body(request, self.limits, claim)
            _, _, found = await self._work(body, work)
        return found

    async def read_json(self, request: Request, work: Callable[[Any], T]) -> T:
        """The same, of a request for no model."""
        with self.bodies.claim(client_of(request.scope)) as claim:
            body = await read_body(request, self.limits, claim)
            return await self.workers.run(lambda body: work(decode_body(body)), body)

    async def prepare(self, request: Request, work: Callable[[Any, ServedText], R]) -> Prepared[R]:
        """Of a request for the engine: what is wrong with it is found before its model loads."""
        self.models.check_ready()
        with self.bodies.claim(client_of(request.scope)) as claim:
            body = await read_body(request, self.limits, claim)
            entry, served, job = await self._work(body, work)
            lease = await self._lease(request, entry, job.timeout_s)
            loaded = self._within_limits(lease.served)
            if loaded.model != served.model:  # it is known exactly since it was loaded
                job = await self.workers.run(lambda body: work(decode_body(body), loaded), body)
        job.keep_apart(owner_salt_of(request.scope))
        shown_with = loaded.text.tokenizer if self.config.log_prompts else None
        record = record_of(request.scope)
        record.ignored = job.leniency.header()
        record.facts = lambda: job.facts(shown_with)
        return Prepared(job, self.use(entry, lease.engine), loaded, entry, lease.waited_s)

    async def _work(
        self, body: bytearray, work: Callable[[Any, ServedText], T]
    ) -> tuple[ServedModel, ServedText, T]:
        """By the model that a body names; what it is decoded to is not kept."""
        if len(body) <= SMALL_BYTES:
            fields = decode_body(body)
            entry, served = await self._served(fields)
            return entry, served, await self.workers.run(lambda _: work(fields, served), body)
        async with self.workers.decoded(body):
            fields = await self.workers.run(decode_body, body)
            entry, served = await self._served(fields)
            return entry, served, await self.workers.run(lambda _: work(fields, served), body)

    async def _served(self, fields: Any) -> tuple[ServedModel, ServedText]:
        entry = self.models.of(fields)
        return entry, self._within_limits(await entry.served_text())

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
        return lease

    def _within_limits(self, served: ServedText) -> ServedText:
        if served.rules.limits is self.limits:
            return served
        return replace(served, rules=replace(served.rules, limits=self.limits))
