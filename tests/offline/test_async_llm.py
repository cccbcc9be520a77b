"""`AsyncLLM` on the toy model: what `LLM` says, for many callers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pippin import LLM, AsyncLLM, SamplingParams
from pippin.backends.fake import FakeBackend
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import ContextOverflow, EngineDead, LoadError, RequestError
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


def test_a_stop_string_ends_a_reply_and_frees_its_place() -> None:
    async def work(llm: AsyncLLM) -> None:
        [whole] = await llm.generate("a fox", GREEDY)
        stop = whole.text[4:8]
        for _ in range(3):
            [cut] = await llm.generate("a fox", replace(ENDLESS, stop=(stop,)))
            assert cut.finish_reason == "stop"
            assert cut.text == whole.text[: whole.text.index(stop)]
        told = await llm._engine.client.counters()
        assert told["metrics"]["requests_aborted"] == 0  # such a reply is complete, and is kept

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
        assert llm._engine.client.num_open == 0

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
        with pytest.raises(EngineDead):
            await call

    asyncio.run(asyncio.wait_for(main(), PATIENCE_SECONDS))
