"""`LLM` for asyncio: many callers at once, the engine in a thread of its own.

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
import atexit
import ctypes
import gc
import os
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Unpack

import numpy as np

from pippin.config import Config, EngineConfig
from pippin.embedding import embedding_of
from pippin.engine.engine_client import DeltaQueue
from pippin.errors import STATUSES, EngineDead
from pippin.messages import Submit, TokenDelta
from pippin.offline.llm import (
    Completion,
    Conversations,
    Message,
    OfflineRequests,
    Params,
    PromptInput,
    Prompts,
    ReplyOptions,
    RequestOptions,
    Router,
    load_offline,
    offline_config,
    only_one,
)
from pippin.scheduler.loop import Loop
from pippin.sequences import GeneratedSequence, SequencePiece
from pippin.startup.resolve import resolve
from pippin.tasks import all_or_none
from pippin.types import SamplingParams

STACK_BYTES = 16 << 20  # as Python's own threads have on macOS, whose default is 512 KB

_SYSTEM = ctypes.CDLL(None)
_ROUTINE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class AsyncLLM:
    """A loaded model. Use it from the event loop that loaded it; close it, or use `async with`.

    One thread loads the model and runs its loop: arrays belong to the thread that made them.
    """

    def __init__(self, config: Config) -> None:
        """`AsyncLLM.load` makes one."""
        self._config = config
        self._event_loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[OfflineRequests] = self._event_loop.create_future()
        self._calls: queue.SimpleQueue[Callable[[Router], None] | None] = queue.SimpleQueue()
        self._readers: dict[str, DeltaQueue] = {}  # of open requests
        self._arrived: list[TokenDelta] = []  # in the present step
        self._end: str | None = None  # why no more requests are taken
        self._stopped = False
        self._thread = _ComputeThread(self._run)
        atexit.register(self._close_at_exit)

    @classmethod
    async def load(
        cls,
        model: str | None = None,
        *,
        dtype: str = "auto",
        engine: EngineConfig | None = None,
        config: Config | None = None,
    ) -> AsyncLLM:
        llm = cls(offline_config(model, dtype, engine, config))
        try:
            await llm._loaded
        except BaseException:
            llm._stop()
            raise
        return llm

    async def generate(
        self, prompts: Prompts, params: Params = None, **options: Unpack[ReplyOptions]
    ) -> list[Completion]:
        """As `LLM.generate`. Cancelling it stops what it asked for."""
        return await self._complete(partial(self._requests.completions, prompts, params, **options))

    async def chat(
        self, messages: Conversations, params: Params = None, **options: Unpack[ReplyOptions]
    ) -> list[Completion]:
        """As `LLM.chat`."""
        return await self._complete(partial(self._requests.chats, messages, params, **options))

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
        self._lose("the model has been closed")
        self._stop()
        await asyncio.to_thread(self._thread.join)
        atexit.unregister(self._close_at_exit)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- in the event loop -----------------------------------------------------------------

    @property
    def _requests(self) -> OfflineRequests:
        return self._loaded.result()

    async def _complete(self, open: Callable[[], list[GeneratedSequence]]) -> list[Completion]:
        sequences = await asyncio.to_thread(open)
        return await all_or_none([self._completion(sequence) for sequence in sequences])

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
        async with aclosing(self._deltas(sequence.submit)) as deltas:
            async for delta in deltas:
                piece = sequence.take(delta)
                is_cut = piece.finish is not None and delta.finish is None  # by a stop string
                if is_cut and self._readers.pop(delta.id, None) is not None:
                    self._calls.put(lambda router: router.finish(sequence.submit.id))
                yield piece
                if piece.finish is not None:
                    return

    async def _vector(self, submit: Submit) -> np.ndarray:
        async with aclosing(self._deltas(submit)) as deltas:
            async for delta in deltas:
                if delta.finish is not None:
                    return embedding_of(delta)
        raise EngineDead("the engine returned no embedding")

    async def _deltas(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        if self._end is not None:
            raise EngineDead(self._end)
        deltas = self._readers[submit.id] = DeltaQueue()
        self._calls.put(lambda router: router.open(submit, self._arrived.append))
        try:
            while True:
                delta = await deltas.get()
                if delta.finish is not None:
                    self._readers.pop(submit.id, None)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            if self._readers.pop(submit.id, None) is not None:
                self._calls.put(lambda router: router.abort(submit.id))

    def _stop(self) -> None:
        self._stopped = True
        self._calls.put(None)

    def _close_at_exit(self) -> None:
        """For a program that forgot to: what computes must not meet an interpreter that ends."""
        self._stop()
        self._thread.join()

    def _end_load(self, result: OfflineRequests | Exception) -> None:
        if self._loaded.cancelled():
            return
        if isinstance(result, Exception):
            self._loaded.set_exception(result)
        else:
            self._loaded.set_result(result)

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            if (reader := self._readers.get(delta.id)) is not None:  # else its caller has left
                reader.put(delta)

    def _lose(self, reason: str) -> None:
        """Every open request ends."""
        self._end = self._end or reason
        code, status = EngineDead.code, STATUSES[EngineDead.code]
        for id, reader in self._readers.items():
            reader.put(
                TokenDelta(id, finish="error", error=reason, error_code=code, error_status=status)
            )

    # ---- in the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with _collected_here():
                loop, text = load_offline(resolve(self._config), self._check_stopped)
                router, requests = Router(loop), OfflineRequests(text, loop.backend.spec)
        except Exception as error:  # raised again by `load`
            self._post(self._end_load, error)
            return
        self._post(self._end_load, requests)
        try:
            self._serve(loop, router)
        except Exception as error:
            self._post(self._lose, f"the engine stopped: {str(error) or repr(error)}")
        with _collected_here():
            loop.close()
            del loop, router, requests, text

    def _check_stopped(self, stage: str) -> None:
        if self._stopped:
            raise EngineDead(f"closed before the model was loaded ({stage})")

    def _serve(self, loop: Loop, router: Router) -> None:
        """Until it is stopped."""
        while True:
            with suppress(queue.Empty):
                while True:
                    call = self._calls.get(block=router.idle and loop.warm_up.done)
                    if call is None:
                        return
                    call(router)
            if router.idle:
                if not loop.warm_up.done:
                    loop.warm_up.run_next()
                continue
            router.step()
            if self._arrived:
                arrived = self._arrived.copy()
                self._arrived.clear()
                for delta in arrived:
                    if delta.finish is not None:
                        router.forget(delta.id)
                self._post(self._deliver, arrived)
            if loop.failure is not None:
                raise loop.failure

    def _post(self, call: Callable[[Any], None], arg: object) -> None:
        try:
            self._event_loop.call_soon_threadsafe(call, arg)
        except RuntimeError:
            if not self._event_loop.is_closed():  # nothing waits for what is closed
                raise


class _ComputeThread:
    """A thread of the system's, whose `join` waits until nothing of it is left.

    mlx keeps objects for each thread, and destroys them with Python's lock held after the last line
    of Python has run there. If the interpreter is shutting down by then, the process aborts, and
    before Python 3.13 `Thread.join` does not wait for it.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._routine = _ROUTINE(lambda _: work())  # the thread calls it: it must not be freed
        self._id = ctypes.c_void_p()
        self._joining = threading.Lock()
        self._is_joined = False
        attributes = ctypes.create_string_buffer(256)  # larger than any system's
        _check(_SYSTEM.pthread_attr_init(attributes))
        _check(_SYSTEM.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK_BYTES)))
        started = _SYSTEM.pthread_create(ctypes.byref(self._id), attributes, self._routine, None)
        _SYSTEM.pthread_attr_destroy(attributes)
        _check(started)

    def join(self) -> None:
        with self._joining:
            if not self._is_joined:
                _check(_SYSTEM.pthread_join(self._id, None))
                self._is_joined = True


def _check(status: int) -> None:
    if status:
        raise OSError(status, f"a thread of the engine: {os.strerror(status)}")


@contextmanager
def _collected_here() -> Iterator[None]:
    """What is dropped inside is destroyed by this thread, also where it forms cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold what had been loaded
        raise
    finally:
        gc.collect()
        if was_enabled:
            gc.enable()
