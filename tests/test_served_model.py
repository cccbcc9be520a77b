"""The bundled model behind a real server, as people's tools meet it: the official client."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionTokenLogprob

from near_ties import ENOUGH, MARGIN
from processes import PATIENCE_SECONDS, serve, wait_until

pytestmark = pytest.mark.slow

MODEL = "stories-hybrid-20m"
ASK = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as served:
        yield served.url
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(PATIENCE_SECONDS) == 0


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def num_clear(scored: Sequence[ChatCompletionTokenLogprob]) -> int:
    """How many tokens come before the first whose two best are as good as each other."""
    for place, token in enumerate(scored):
        best, second = (top.logprob for top in token.top_logprobs)
        if best - second <= MARGIN:
            return place
    return len(scored)


def test_a_streamed_reply_is_the_whole_reply_in_pieces(url: str) -> None:
    """As far as both must say the same: the second finds its prompt in the cache."""
    chat = client(url).chat.completions
    # Long enough that a client which the machine leaves waiting is sent more than one write.
    ask = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 120}
    whole = chat.create(**ask, logprobs=True, top_logprobs=2).choices[0]
    *chunks, last = chat.create(**ask, stream=True, stream_options={"include_usage": True})
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    streamed = "".join(pieces)
    tokens = [scored.token for scored in whole.logprobs.content]
    assert "".join(tokens) == whole.message.content
    clear = num_clear(whole.logprobs.content)
    assert streamed.startswith("".join(tokens[:clear]))
    assert clear < len(tokens) or streamed == whole.message.content
    assert clear >= ENOUGH * len(tokens)
    assert len([piece for piece in pieces if piece]) > 10
    assert whole.finish_reason == "length"
    assert last.usage.completion_tokens == 120


def test_the_next_turn_says_what_it_did_not_compute(url: str) -> None:
    chat = client(url).chat.completions
    long_ask = [{"role": "user", "content": "Tell me a story about a fox and a hen. " * 20}]
    first = chat.create(model=MODEL, messages=long_ask, temperature=0, max_tokens=30)
    reply = {"role": "assistant", "content": first.choices[0].message.content}
    turn = [*long_ask, reply, {"role": "user", "content": "What happened next?"}]
    second = chat.create(model=MODEL, messages=turn, temperature=0, max_tokens=5)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert second.usage.prompt_tokens - 127 <= cached < second.usage.prompt_tokens


def test_sixty_four_requests_at_once_all_finish(url: str) -> None:
    async def ask(chat: openai.AsyncOpenAI, number: int) -> openai.types.Completion:
        return await chat.completions.create(
            model=MODEL,
            prompt=f"Tale number {number}. Once upon a time",
            temperature=0,
            max_tokens=3 + number % 5,
        )

    async def all_at_once() -> list[openai.types.Completion]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as chat:
            return await asyncio.gather(*(ask(chat, number) for number in range(64)))

    replies = asyncio.run(all_at_once())
    assert [reply.choices[0].finish_reason for reply in replies] == ["length"] * 64
    lengths = [reply.usage.completion_tokens for reply in replies if reply.usage]
    assert lengths == [3 + number % 5 for number in range(64)]


def test_a_client_that_leaves_frees_its_slot(url: str) -> None:
    body = {"model": MODEL, "messages": ASK, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()  # kept: a generator that is dropped closes the connection
        next(lines)
        assert httpx.get(f"{url}/status").json()["running"] == 1
    wait_until(lambda: not httpx.get(f"{url}/status").json()["running"])
    assert httpx.get(f"{url}/status").json()["metrics"]["requests_aborted"] >= 1
