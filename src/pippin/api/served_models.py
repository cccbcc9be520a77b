"""The models of a server, and which one a request is for.

A request is read by its model's text and rules, waits until that model is loaded, and has a lease
on its engine until its reply has been sent. A server of one model has it loaded all the time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pippin.api.model_info import ModelInfo, RequestRules, spread
from pippin.config import LimitsConfig, ServerConfig
from pippin.engine.engine_client import RequestEngine
from pippin.engine.engine_pool import EnginePool
from pippin.errors import NotReady
from pippin.switching import Lease, ModelEngines
from pippin.text.bundle import TextBundle

LATEST = ":latest"  # Ollama's tag of a name that has none


@dataclass(frozen=True)
class ServedText:
    """What requests for one model are read by."""

    text: TextBundle
    rules: RequestRules

    @property
    def model(self) -> ModelInfo:
        return self.rules.model


@dataclass(frozen=True)
class Residency:
    """Whether a model is in memory, and who uses it."""

    state: str = "ready"  # see `switching.py`
    num_open: int | None = None  # requests; None: not counted, since it stays loaded
    num_waiting: int = 0  # for it to be loaded
    num_loads: int = 1
    seconds_left: float | None = None  # until it is unloaded, if no request arrives; None: it stays
    nbytes: int = 0  # that it claims of the memory budget; 0: its engine measures it

    @property
    def is_loaded(self) -> bool:
        return self.state == "ready"


@dataclass(frozen=True)
class ModelLease:
    """A model stays loaded until its lease is released."""

    engine: RequestEngine
    served: ServedText
    place: int = 0  # among all that waited for a load when this request arrived; 0: it did not wait
    waited_s: float = 0.0
    release: Callable[[], None] = lambda: None


class ServedModels:
    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in self._models:
            for name in model.info.accepted_names or model.info.names:
                self._by_name.setdefault(name, model)
        self._any = next((m for m in self._models if m.info.accepted_names is None), None)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def default(self) -> ServedModel:
        """For requests that name no model."""
        return self._models[0]

    @property
    def are_several(self) -> bool:
        return len(self._models) > 1

    def find(self, name: str) -> ServedModel | None:
        return self._by_name.get(name) or self._by_name.get(name.removesuffix(LATEST)) or self._any

    def get(self, name: str | None) -> ServedModel:
        """By a name in an address; None: the default."""
        if name is None:
            return self.default
        if (found := self.find(name)) is None:
            raise self.default.info.not_found(name)
        return found

    def of(self, fields: Any) -> ServedModel:
        """The model that a request's JSON names. A wrong name is found when its fields are read."""
        named = spread(fields)
        name = named.get("model") or named.get("name") if isinstance(named, dict) else None
        return (self.find(name) if isinstance(name, str) else None) or self.default

    def check_ready(self) -> None:
        """Raise NotReady if no model takes requests."""
        first: NotReady | None = None
        for model in self._models:
            try:
                return model.check_ready()
            except NotReady as error:
                first = first or error
        assert first is not None, "there is a model"
        raise first


def rules_of(
    model: ModelInfo, text: TextBundle, config: ServerConfig, limits: LimitsConfig
) -> RequestRules:
    return RequestRules(
        model,
        text.defaults,
        limits,
        strict_fields=config.strict_fields,
        refuses_images=config.images == "refuse",
        normalises_prompts=config.prompt_normalisation,
    )


class FixedModel:
    """A model that is loaded all the time."""

    def __init__(
        self,
        engine: EnginePool,
        text: TextBundle,
        info: ModelInfo,
        config: ServerConfig,
        limits: LimitsConfig,
    ) -> None:
        self._lease = ModelLease(engine, ServedText(text, rules_of(info, text, config, limits)))
        self.engine = engine
        self.info = info
        self.residency = Residency()

    def check_ready(self) -> None:
        """Raise NotReady unless new requests are taken."""
        self.engine.check_ready()

    async def served_text(self) -> ServedText:
        return self._lease.served

    def lease_now(self) -> ModelLease | None:
        """None: a request has to wait for the model to be loaded."""
        return self._lease

    async def lease(self) -> ModelLease:
        return self._lease

    def keep_alive(self, seconds: float | None) -> None:
        """None: for ever; 0: it is unloaded when its last reply ends. This one stays."""


MAX_TEXTS = 8  # of large vocabularies each takes about 100 MB


class TextCache:
    def __init__(self, max_texts: int = MAX_TEXTS) -> None:
        self._max_texts = max_texts
        self._loading: OrderedDict[str, asyncio.Task[TextBundle]] = OrderedDict()

    async def get(self, name: str, load: Callable[[], TextBundle]) -> TextBundle:
        """Loaded once, in a thread, however many requests wait for it."""
        task = self._loading.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._loading[name] = asyncio.create_task(asyncio.to_thread(load))
        self._loading.move_to_end(name)
        while len(self._loading) > self._max_texts:
            self._loading.popitem(last=False)
        return await asyncio.shield(task)

    def loaded(self, name: str) -> TextBundle | None:
        task = self._loading.get(name)
        is_loaded = task is not None and task.done() and not task.cancelled()
        return task.result() if task and is_loaded and not task.exception() else None


class SwitchedModel:
    def __init__(
        self,
        info: ModelInfo,
        engines: ModelEngines,
        texts: TextCache,
        load_text: Callable[[], TextBundle],
        config: ServerConfig,
        limits: LimitsConfig,
    ) -> None:
        """`info`: as far as the checkpoint's files say; the engine says the rest."""
        self.info = info
        self._engines = engines
        self._texts = texts
        self._load_text = load_text
        self._config, self._limits = config, limits
        self._rules: RequestRules | None = None
        self._is_measured = False  # since its first load

    @property
    def engine(self) -> EnginePool | None:
        """While it is loaded."""
        host = self._engines.loaded.get(self.info.name)
        return None if host is None else host.engine

    @property
    def residency(self) -> Residency:
        name = self.info.name
        turn = self._engines.turn(name)
        return Residency(
            state=turn.state,
            num_open=turn.num_open,
            num_waiting=len(turn.waiting),
            num_loads=self._engines.num_loads[name],
            seconds_left=self._engines.seconds_left(name),
            nbytes=turn.nbytes,
        )

    def check_ready(self) -> None:
        self._engines.check_ready()

    async def served_text(self) -> ServedText:
        text = await self._texts.get(self.info.name, self._load_text)
        if self._rules is None:
            self._rules = rules_of(self.info, text, self._config, self._limits)
        return ServedText(text, self._rules)

    def lease_now(self) -> ModelLease | None:
        text = self._texts.loaded(self.info.name)
        if text is None or self._rules is None or not self._is_measured:
            return None
        lease = self._engines.lease_now(self.info.name)
        return None if lease is None else self._lease(lease, ServedText(text, self._rules))

    async def lease(self) -> ModelLease:
        lease = await self._engines.lease(self.info.name)
        try:
            served, ready = await self.served_text(), lease.host.loaded.result()
            self.info = replace(
                served.model,
                max_len=ready.max_len,
                vocab_size=ready.vocab_size,
                takes_predictions=ready.takes_predictions,
            )
            self._rules, self._is_measured = replace(served.rules, model=self.info), True
            return self._lease(lease, ServedText(served.text, self._rules))
        except BaseException:
            self._engines.release(lease)
            raise

    def keep_alive(self, seconds: float | None) -> None:
        self._engines.keep_alive(self.info.name, seconds)

    def _lease(self, lease: Lease, served: ServedText) -> ModelLease:
        engine, place = lease.host.engine, lease.ticket.place
        return ModelLease(
            engine, served, place, lease.waited_s, lambda: self._engines.release(lease)
        )


ServedModel = FixedModel | SwitchedModel
