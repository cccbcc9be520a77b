"""The models of a server, and which one a request is for. Knows no route and no engine process.

A request is read by its model's text and rules, waits until that model is loaded, and has a lease
on its engine until its reply has been sent. A server of one model has it loaded all the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pippin.api.model_info import ModelInfo, RequestRules, spread
from pippin.config import LimitsConfig, ServerConfig
from pippin.engine.engine_client import Engine
from pippin.errors import NotReady
from pippin.text.bundle import TextBundle

LATEST = ":latest"  # Ollama's tag of a name that has none
NOT_LOADED = "the model is not loaded"


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

    state: str = "ready"  # see `switching/turns.py`
    num_open: int | None = None  # requests; None: not counted, since it stays loaded
    num_waiting: int = 0  # for it to be loaded
    num_loads: int = 1
    seconds_left: float | None = None  # until it is unloaded, if no request arrives; None: it stays
    nbytes: int = 0  # that it claims of the memory budget; 0: its engine measures it

    @property
    def is_loaded(self) -> bool:
        return self.state == "ready"


class ModelLease(Protocol):
    @property
    def engine(self) -> Engine: ...

    @property
    def served(self) -> ServedText: ...

    @property
    def place(self) -> int:
        """Among all requests that waited for a load when this one arrived; 0: it did not wait."""
        ...

    @property
    def waited_s(self) -> float: ...

    def release(self) -> None: ...


class ServedModel(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def engine(self) -> Engine | None:
        """While it is loaded."""
        ...

    @property
    def residency(self) -> Residency: ...

    def check_ready(self) -> None:
        """Raise NotReady unless new requests are taken."""
        ...

    async def served_text(self) -> ServedText: ...

    def lease_now(self) -> ModelLease | None:
        """None: a request has to wait for the model to be loaded."""
        ...

    async def lease(self) -> ModelLease: ...

    def keep_alive(self, seconds: float | None) -> None:
        """None: for ever; 0: it is unloaded when its last reply ends."""
        ...


class ServedModels:
    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = tuple(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in self._models:
            for name in model.info.accepted_names or model.info.names:
                self._by_name.setdefault(name, model)
        self._any = next((m for m in self._models if m.info.accepted_names is None), None)

    @classmethod
    def of_one(
        cls,
        engine: Engine,
        text: TextBundle,
        model: ModelInfo,
        config: ServerConfig,
        limits: LimitsConfig,
    ) -> ServedModels:
        """A model that is loaded all the time."""
        served = ServedText(text, rules_of(model, text, config, limits))
        return cls([FixedModel(engine, served)])

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

    def check_name(self, name: str) -> None:
        self.get(name)

    def of(self, fields: Any) -> ServedModel:
        """The model that a request's JSON names. A wrong name is found when its fields are read."""
        named = spread(fields)
        name = named.get("model") or named.get("name") if isinstance(named, dict) else None
        return (self.find(name) if isinstance(name, str) else None) or self.default

    def check_ready(self) -> None:
        """Raise NotReady if no model takes requests."""
        errors: list[NotReady] = []
        for model in self._models:
            try:
                model.check_ready()
                return
            except NotReady as error:
                errors.append(error)
        raise errors[0]


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


@dataclass(frozen=True)
class _FixedLease:
    engine: Engine
    served: ServedText
    place: int = 0
    waited_s: float = 0.0

    def release(self) -> None:
        """Its engine is not stopped."""


class FixedModel:
    """A model that is loaded all the time."""

    def __init__(self, engine: Engine, served: ServedText) -> None:
        self._lease = _FixedLease(engine, served)
        self.engine: Engine | None = engine
        self.info = served.model
        self.residency = Residency()

    def check_ready(self) -> None:
        self._lease.engine.check_ready()

    async def served_text(self) -> ServedText:
        return self._lease.served

    def lease_now(self) -> ModelLease | None:
        return self._lease

    async def lease(self) -> ModelLease:
        return self._lease

    def keep_alive(self, seconds: float | None) -> None:
        """It stays."""
