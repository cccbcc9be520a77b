"""A model that is loaded when a request arrives. Knows no process: `switching/` starts engines.

Its tokenizer and template are loaded when they are first needed; those of the models that were used
last are kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.served_models import ModelLease, Residency, ServedText, rules_of
from pippin.config import LimitsConfig, ServerConfig
from pippin.engine.engine_client import Engine
from pippin.messages import Ready
from pippin.switching.model_engines import Lease, ModelEngines
from pippin.text.bundle import TextBundle

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
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        return task.result()


@dataclass(frozen=True)
class _SwitchedLease:
    engine: Engine
    served: ServedText
    place: int
    waited_s: float
    release: Callable[[], None]


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
    def engine(self) -> Engine | None:
        loaded = self._engines.loaded(self.info.name)
        return None if loaded is None else loaded.engine

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
            served = self._measured(await self.served_text(), lease.loaded.ready)
            self._rules, self.info, self._is_measured = served.rules, served.model, True
            return self._lease(lease, served)
        except BaseException:
            self._engines.release(lease)
            raise

    def keep_alive(self, seconds: float | None) -> None:
        self._engines.keep_alive(self.info.name, seconds)

    def _measured(self, served: ServedText, ready: Ready) -> ServedText:
        model = replace(
            served.model,
            max_len=ready.max_len,
            vocab_size=ready.vocab_size,
            takes_predictions=ready.takes_predictions,
        )
        return replace(served, rules=replace(served.rules, model=model))

    def _lease(self, lease: Lease, served: ServedText) -> ModelLease:
        return _SwitchedLease(
            lease.loaded.engine,
            served,
            lease.ticket.place,
            lease.waited_s,
            lambda: self._engines.release(lease),
        )
