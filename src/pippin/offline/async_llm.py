"""`LLM` for asyncio: many callers at once, the engine in a thread of its own. Knows no HTTP.

import asyncio
from pippin import AsyncLLM

async def main():
    async with await AsyncLLM.load() as llm:
        async for text in llm.stream_generate("Once upon a time"):
            print(text, end="", flush=True)

asyncio.run(main())
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from pippin.config import Config, EngineConfig
from pippin.embedding import embedding_of
from pippin.engine.build_loop import build_loop
from pippin.engine.engine_client import EngineClient
from pippin.engine.message_pump import MessagePump
from pippin.errors import EngineDead
from pippin.messages import (
    Answer,
    Compiled,
    FeedMessage,
    FromEngine,
    Shutdown,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
)
from pippin.offline.offline_requests import (
    Completion,
    Conversations,
    Message,
    OfflineRequests,
    Params,
    PromptInput,
    Prompts,
    ReplyOptions,
    RequestOptions,
    offline_config,
    only_one,
)
from pippin.sequences import GeneratedSequence, SequencePiece
from pippin.startup.resolve import resolve
from pippin.tasks import all_or_none
from pippin.text.bundle import TextBundle
from pippin.types import SamplingParams


class AsyncLLM:
    """A loaded model. Use it from the event loop that loaded it; close it, or use `async with`."""

    def __init__(self, engine: _EngineThread, requests: OfflineRequests, max_queue: int) -> None:
        """`AsyncLLM.load` makes one."""
        self._engine = engine
        self._requests = requests
        self._room = asyncio.Semaphore(max_queue)  # the engine refuses more

    @classmethod
    async def load(
        cls,
        model: str | None = None,
        *,
        dtype: str = "auto",
        engine: EngineConfig | None = None,
        config: Config | None = None,
    ) -> AsyncLLM:
        chosen = offline_config(model, dtype, engine, config)
        thread = _EngineThread(chosen)
        requests = await thread.loaded
        return cls(thread, requests, chosen.engine.max_queue)

    async def generate(
        self, prompts: Prompts, params: Params = None, **options: Unpack[ReplyOptions]
    ) -> list[Completion]:
        """As `LLM.generate`. Cancelling it stops what it asked for."""
        open = partial(self._requests.completions, prompts, params, **options)
        sequences = await asyncio.to_thread(open)
        return await all_or_none([self._completion(sequence) for sequence in sequences])

    async def chat(
        self, messages: Conversations, params: Params = None, **options: Unpack[ReplyOptions]
    ) -> list[Completion]:
        """As `LLM.chat`."""
        open = partial(self._requests.chats, messages, params, **options)
        sequences = await asyncio.to_thread(open)
        return await all_or_none([self._completion(sequence) for sequence in sequences])

    async def embed(self, prompts: Prompts, **options: Unpack[RequestOptions]) -> np.ndarray:
        """As `LLM.embed`."""
        submits = await asyncio.to_thread(partial(self._requests.embeddings, prompts, **options))
        return np.stack(await all_or_none([self._vector(submit) for submit in submits]))

    def stream_generate(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        **options: Unpack[ReplyOptions],
    ) -> AsyncGenerator[str, None]:
        """The continuation's text as it arrives. Closing the generator stops it."""
        return self._stream(partial(self._requests.completions, [prompt], params, **options))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ReplyOptions],
    ) -> AsyncGenerator[str, None]:
        """The answer's text as it arrives. Closing the generator stops the reply."""
        return self._stream(partial(self._requests.chats, messages, params, **options))

    async def close(self) -> None:
        """Requests that are still open end with an error."""
        await self._engine.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- inside ----------------------------------------------------------------------------

    async def _stream(
        self, open: Callable[[], list[GeneratedSequence]]
    ) -> AsyncGenerator[str, None]:
        sequence = only_one(await asyncio.to_thread(open))
        async with aclosing(self._pieces(sequence)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    async def _completion(self, sequence: GeneratedSequence) -> Completion:
        completion = Completion(list(sequence.prompt.tokens))
        async with aclosing(self._pieces(sequence)) as pieces:
            async for piece in pieces:
                completion.add(piece)
        completion.close(sequence)
        return completion

    async def _pieces(self, sequence: GeneratedSequence) -> AsyncGenerator[SequencePiece, None]:
        async with self._room, aclosing(self._engine.generate(sequence.submit)) as deltas:
            async for delta in deltas:
                piece = sequence.take(delta)
                if piece.finish is not None and delta.finish is None:
                    self._engine.client.finish(delta.id)  # a stop string
                yield piece
                if piece.finish is not None:
                    return

    async def _vector(self, submit: Submit) -> np.ndarray:
        async with self._room, aclosing(self._engine.generate(submit)) as deltas:
            async for delta in deltas:
                if delta.finish is not None:
                    return embedding_of(delta)
        raise EngineDead("the engine returned no embedding")


class _EngineThread:
    """Loads a model and runs its loop in one thread: arrays belong to the thread that made them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._event_loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self.loaded: asyncio.Future[OfflineRequests] = self._event_loop.create_future()
        self.client = EngineClient()
        self._failure: str | None = None
        # A program that forgets to close it must be able to end.
        self._thread = threading.Thread(target=self._run, name="pippin-engine", daemon=True)
        self._thread.start()

    def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        if self._failure is not None:
            raise EngineDead(self._failure)
        return self.client.generate(submit)

    async def close(self) -> None:
        self.client.close()
        self._inbox.put(Shutdown())
        await asyncio.to_thread(self._thread.join)

    # ---- in the event loop -----------------------------------------------------------------

    def _ready(self, requests: OfflineRequests) -> None:
        if not self.loaded.cancelled():
            self.client.engine_ready(_Sender(self._inbox))
            self.loaded.set_result(requests)

    def _not_loaded(self, error: Exception) -> None:
        if not self.loaded.cancelled():
            self.loaded.set_exception(error)

    def _lost(self, reason: str) -> None:
        self._failure = reason
        self.client.drain()  # there will be no other
        self.client.engine_lost(reason)

    # ---- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            config = resolve(self._config)
            text = TextBundle.load(Path(config.model.model))
            loop = build_loop(config, progress=lambda _: None)
        except Exception as error:  # raised again by `load`
            self._event_loop.call_soon_threadsafe(self._not_loaded, error)
            return
        requests = OfflineRequests(text, loop.backend.spec)
        self._event_loop.call_soon_threadsafe(self._ready, requests)
        try:
            MessagePump(loop, self).run()
        except Exception as error:  # every open request ends with it
            reason = f"the engine stopped: {str(error) or repr(error)}"
            self._event_loop.call_soon_threadsafe(self._lost, reason)
        loop.close()

    def send(self, message: FromEngine) -> None:
        assert isinstance(message, TokenBatch | Started | Compiled | Answer | FeedMessage)
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self.client.deliver, message)

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        try:
            messages.append(self._inbox.get(block=wait_seconds > 0, timeout=wait_seconds or None))
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages


class _Sender:
    alive = True

    def __init__(self, inbox: queue.SimpleQueue[ToEngine]) -> None:
        self._inbox = inbox

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)
