"""What all endpoints share: one engine, one model, one pool of threads. Knows no route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from pippin.api.http.access_control import owner_salt_of
from pippin.api.http.keys import Admins
from pippin.api.http.read_body import decode_body, read_body
from pippin.api.http.request_log import record_of
from pippin.api.http.workers import Workers
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.leniency import Leniency
from pippin.config import ServerConfig
from pippin.engine.engine_client import Engine
from pippin.text.bundle import TextBundle
from pippin.text.tokenizer import Tokenizer

T = TypeVar("T")


class Runnable(Protocol):
    @property
    def leniency(self) -> Leniency: ...

    def keep_apart(self, owner_salt: bytes) -> None: ...

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]: ...


R = TypeVar("R", bound=Runnable)


@dataclass(frozen=True)
class AppState:
    engine: Engine
    text: TextBundle
    config: ServerConfig
    rules: RequestRules
    workers: Workers = field(default_factory=Workers)

    @property
    def model(self) -> ModelInfo:
        return self.rules.model

    @property
    def admins(self) -> Admins:
        return Admins(self.config)

    async def read(self, request: Request, work: Callable[[Any], T]) -> T:
        """The result of `work` on a request's JSON, in a thread."""
        body = await read_body(request, self.rules.limits)
        return await self.workers.run(lambda body: work(decode_body(body)), body)

    async def prepare(self, request: Request, work: Callable[[Any], R]) -> R:
        """The same, of a request for the engine."""
        self.engine.check_ready()
        job = await self.read(request, work)
        job.keep_apart(owner_salt_of(request.scope))
        shown_with = self.text.tokenizer if self.config.log_prompts else None
        record_of(request.scope).ignored = job.leniency.header()
        record_of(request.scope).facts = lambda: job.facts(shown_with)
        return job
