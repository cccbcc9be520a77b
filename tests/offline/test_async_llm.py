"""`AsyncLLM` on the toy model: what `LLM` says, for many callers at once."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pippin import LLM, AsyncLLM, SamplingParams
from pippin.backends.fake import FakeBackend
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.engine.build_loop import build_loop
from pippin.errors import ContextOverflow, EngineDead, LoadError, RequestError
from pippin.offline import llm as llm_module
from pippin.scheduler.loop import Loop
from processes import PATIENCE_SECONDS

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ENDLESS = replace(GREEDY, max_tokens=5000)
FOX = [{"role": "user", "content": "Tell me a story about a fox."}]
CROW = [{"role": "user", "content": "What did the crow say?"}]


def toy(**engine: Any) -> Config:
    return Config(model=ModelConfig(backend="fake"), engine=EngineConfig(**engine))


def run(work: Callable[[AsyncLLM], Awaitable[None]], **engine: Any) -> None:
    async def main() -> None:
        async with await AsyncLLM.load(config=toy(**engine)) as llm:
            await work(llm)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SECONDS))


def test_it_says_what_llm_says() -> None:
    prompts = [[n, n + 1] for n in range(5)]
    two = replace(GREEDY, n=2, seed=3, temperature=1.0, logprobs=1, prompt_logprobs=0)
    with LLM(config=toy()) as llm:
        generated, chats = llm.generate(prompts, two), llm.chat([FOX, CROW], GREEDY)
        vectors = llm.embed(prompts)
        streamed = "".join(llm.stream_generate("a fox", GREEDY))
        assert streamed == llm.generate("a fox", GREEDY)[0].text

    async def work(llm: AsyncLLM) -> None:
        assert await llm.generate(prompts, two) == generated
        assert await llm.chat([FOX, CROW], GREEDY) == chats
        np.testing.assert_array_equal(await llm.embed(prompts), vectors)
        assert "".join([text async for text in llm.stream_generate("a fox", GREEDY)]) == streamed
        assert "".join([text async for text in llm.stream_chat(FOX, GREEDY)]) == chats[0].text

    run(work)


def test_any_number_of_callers_are_served_at_once_whatever_the_queue_holds() -> None:
    async def work(llm: AsyncLLM) -> None:
        alone = [(await llm.generate([n, 90], GREEDY))[0].tokens for n in range(20)]
        calls = [llm.generate([n, 90], GREEDY) for n in range(20)]
        together = [completion.tokens for [completion] in await asyncio.gather(*calls)]
        assert together == alone
        assert len(await llm.generate([[n, 5] for n in range(30)], GREEDY)) == 30

    run(work, max_running=2, max_queue=3)


def test_a_stop_string_ends_a_reply_and_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Loop] = []

    def build(*args: Any, **kwargs: Any) -> Loop:
        made.append(build_loop(*args, **kwargs))
        return made[0]

    monkeypatch.setattr(llm_module, "build_loop", build)

    async def work(llm: AsyncLLM) -> None:
        [whole] = await llm.generate("a fox", GREEDY)
        stop = whole.text[4:8]
        for _ in range(3):
            [cut] = await llm.generate("a fox", replace(ENDLESS, stop=(stop,)))
            assert cut.finish_reason == "stop"
            assert cut.text == whole.text[: whole.text.index(stop)]
        assert (
            made[0].counters()["metrics"]["requests_aborted"] == 0
        )  # such a reply is complete, and is kept

    run(work, max_running=1, max_queue=1)


def test_streams_that_are_closed_and_calls_that_are_cancelled_leave_nothing_behind() -> None:
    async def work(llm: AsyncLLM) -> None:
        async with aclosing(llm.stream_chat(FOX, ENDLESS)) as texts:
            async for _ in texts:
                break
        call = asyncio.create_task(llm.generate([[1, 2], [3, 4]], ENDLESS))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await llm.generate([5, 6], GREEDY)  # there is one slot, and it is free
        assert not llm._readers

    run(work, max_running=1)


def test_wrong_input_is_refused_in_the_same_words() -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="temperature"):
            await llm.generate("a", SamplingParams(temperature=9))
        with pytest.raises(ContextOverflow):
            await llm.embed([[5] * 9000])
        with pytest.raises(RequestError, match="n is 2"):
            await anext(llm.stream_generate("a", replace(GREEDY, n=2)))
        with pytest.raises(RequestError, match="look-around"):
            await llm.generate("a", replace(GREEDY, regex="(?=a)"))

    run(work)


def test_a_model_that_does_not_load_raises_where_it_was_asked_for() -> None:
    async def main() -> None:
        await AsyncLLM.load("/nothing/there")

    with pytest.raises(LoadError):
        asyncio.run(main())
    with pytest.raises(ValueError, match="not both"):
        asyncio.run(_load_twice())


async def _load_twice() -> None:
    await AsyncLLM.load("model", config=toy())


def test_an_engine_that_dies_is_told_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM) -> None:
        def broken(self: FakeBackend, plan: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(FakeBackend, "launch", broken)
        results = await asyncio.gather(
            *(llm.generate([n, 1], GREEDY) for n in range(5)), return_exceptions=True
        )
        assert all("the device is gone" in str(error) for error in results)
        with pytest.raises(EngineDead, match="the device is gone"):
            await llm.generate([1, 2], GREEDY)

    run(work, max_running=1)


def test_who_waits_when_it_is_closed_hears_so() -> None:
    async def main() -> None:
        llm = await AsyncLLM.load(config=toy())
        call = asyncio.create_task(llm.generate([1, 2], ENDLESS))
        await asyncio.sleep(0.05)
        await llm.close()
        with pytest.raises(EngineDead, match="closed"):
            await call
        with pytest.raises(EngineDead, match="closed"):
            await llm.generate([1, 2])

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SECONDS))


def test_close_waits_until_nothing_of_the_engines_thread_is_left() -> None:
    """mlx destroys what a thread has of it after Python's part of that thread has ended, with
    Python's lock held: where the interpreter shuts down meanwhile, the process aborts."""
    ended: list[str] = []
    local = ctypes.c_uint()
    system = ctypes.CDLL(None)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def slow(_: int) -> None:  # as such an object's destructor
        time.sleep(0.2)
        ended.append("destroyed")

    assert system.pthread_key_create(ctypes.byref(local), slow) == 0

    class Backend(FakeBackend):
        def close(self) -> None:
            system.pthread_setspecific(local, ctypes.c_void_p(1))

    async def work(llm: AsyncLLM) -> None:
        await llm.generate("a fox", GREEDY)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeBackend, "close", Backend.close)
        run(work)
    assert ended == ["destroyed"]


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "await asyncio.sleep(0)"])
def test_a_program_that_closes_nothing_ends(ending: str) -> None:
    program = f"""
import asyncio
import subprocess
import sys
from pippin import AsyncLLM
from pippin.config import Config, ModelConfig
async def main():
    llm = await AsyncLLM.load(config=Config(model=ModelConfig(backend="fake")))
    async for text in llm.stream_generate("a fox"):
        break
    asyncio.get_running_loop().llm = llm
    {ending}
asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_closed_engine_leaves_nothing_to_another_threads_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[Loop]] = []

    def build(*args: Any, **kwargs: Any) -> Loop:
        loop = build_loop(*args, **kwargs)
        loop.cycle = loop  # type: ignore[attr-defined]  # compiled functions have such
        made.append(weakref.ref(loop))
        return loop

    async def work(llm: AsyncLLM) -> None:
        await llm.generate("a fox", GREEDY)

    monkeypatch.setattr(llm_module, "build_loop", build)
    gc.disable()
    try:
        run(work)
        assert [ref() for ref in made] == [None]
        assert not gc.isenabled()  # it is the program's
    finally:
        gc.enable()
