"""An agent's session as clients send it: what a turn shares with the last one is not computed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
from qwen35_server import MODEL, TEXT
from scripted_engine import ScriptedEngine, serving

from builders import Client, make_loop
from call_texts import write_calls
from pippin.backends.fake import FakeBackend
from pippin.messages import Submit, TokenDelta
from qwen35 import END_OF_TURN

pytestmark = pytest.mark.slow

NUM_TURNS = 12
REMINDER_EVERY = 4
LEAST_SHARE = 0.95
LEAST_SHARED_TOKENS = 15_000
WORDS = [
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"),
    *("lambda", "mu", "nu", "xi", "omicron"),
]


@dataclass
class Recited:
    """A grammar that leaves no choice: the reply is these tokens."""

    tokens: Sequence[int]
    num_said: int = 0
    slow: bool = False

    @property
    def finished(self) -> bool:
        return self.num_said == len(self.tokens)

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = 0
        word, bit = divmod(self.tokens[self.num_said], 32)
        mask.view(np.uint32)[word] = np.uint32(1 << bit)

    def forced(self) -> list[int]:
        return list(self.tokens[self.num_said :])

    def advance(self, tokens: Sequence[int]) -> None:
        assert list(tokens) == list(self.tokens[self.num_said : self.num_said + len(tokens)])
        self.num_said += len(tokens)


@dataclass
class Turn:
    prompt: list[int]
    reply: list[int]
    cached_tokens: int


@dataclass
class RecitingEngine(ScriptedEngine):
    """The real scheduler and prefix cache on the toy model, which recites what an agent says."""

    turns: list[Turn] = field(default_factory=list)
    reason: str | None = None

    def __post_init__(self) -> None:
        backend = FakeBackend(vocab_size=MODEL.vocab_size, max_len=MODEL.max_len, num_slots=4)
        self._client = Client(make_loop(backend=backend, chunk=2048))

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        text = agent_says(len(self.turns))
        tokens = [*TEXT.tokenizer.encode(text, add_special_tokens=False), END_OF_TURN]
        reply = self._client.ask(
            submit.token_ids,
            grammar=Recited(tokens),
            boundaries=submit.boundaries,
            stop_ids=submit.stop_ids,
            max_tokens=submit.params.max_tokens,
        )
        assert reply.tokens == tokens
        assert reply.cached_tokens is not None
        self.turns.append(Turn(submit.token_ids, tokens, reply.cached_tokens))
        yield TokenDelta(submit.id, tokens=tokens, cached_tokens=reply.cached_tokens, finish="stop")


def agent_says(turn: int) -> str:
    call = ("tool_3", {"path": f"src/file_{turn}.py", "line": turn})
    return f"I should look at file {turn} next.\n</think>\n\nLet me read it.\n\n" + write_calls(
        "qwen3_coder", [call]
    )


def prose(num_words: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), num_words))


SYSTEM = prose(10_500, 0)
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
    "required": ["path"],
}
FUNCTIONS = [(f"tool_{i}", prose(60, i)) for i in range(20)]


def reminder(turn: int) -> str | None:
    return (
        f"<system-reminder>{prose(30, turn)}</system-reminder>"
        if turn % REMINDER_EVERY == 3
        else None
    )


def result(turn: int) -> str:
    return prose(200, 100 + turn)


def chat_session(url: str) -> list[int]:
    tools = [
        {"type": "function", "function": {"name": n, "description": d, "parameters": SCHEMA}}
        for n, d in FUNCTIONS
    ]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Fix the bug."},
    ]
    told = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(NUM_TURNS):
            reply = client.chat.completions.create(
                model=MODEL.name,
                messages=messages,
                tools=tools,  # type: ignore[arg-type]
            )
            assert reply.usage is not None
            assert reply.usage.prompt_tokens_details is not None
            told.append(reply.usage.prompt_tokens_details.cached_tokens or 0)
            message = reply.choices[0].message
            assert message.tool_calls is not None
            call_id = message.tool_calls[0].id
            messages.append(message.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": result(turn)})
            if (text := reminder(turn)) is not None:
                messages.append({"role": "user", "content": text})
    return told


def responses_session(url: str) -> list[int]:
    tools = [
        {"type": "function", "name": n, "description": d, "parameters": SCHEMA, "strict": False}
        for n, d in FUNCTIONS
    ]
    items: list[Any] = [{"role": "user", "content": "Fix the bug."}]
    told = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(NUM_TURNS):
            reply = client.responses.create(
                model=MODEL.name,
                instructions=SYSTEM,
                input=items,
                tools=tools,  # type: ignore[arg-type]
                store=False,
            )
            assert reply.usage is not None
            told.append(reply.usage.input_tokens_details.cached_tokens)
            items += reply.output
            call: Any = reply.output[-1]
            output = {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": result(turn),
            }
            items.append(output)
            if (text := reminder(turn)) is not None:
                items.append({"role": "user", "content": text})
    return told


def messages_session(url: str) -> list[int]:
    tools = [{"name": n, "description": d, "input_schema": SCHEMA} for n, d in FUNCTIONS]
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [{"role": "user", "content": "Fix the bug."}]
    told = []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for turn in range(NUM_TURNS):
            reply = client.messages.create(
                model=MODEL.name,
                max_tokens=1000,
                system=system,  # type: ignore[arg-type]
                messages=messages,
                tools=tools,  # type: ignore[arg-type]
            )
            told.append(reply.usage.cache_read_input_tokens or 0)
            call: Any = reply.content[-1]
            blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": result(turn)}]
            if (text := reminder(turn)) is not None:
                blocks.append({"type": "text", "text": text})
            messages.append({"role": "assistant", "content": reply.content})
            messages.append({"role": "user", "content": blocks})
    return told


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("session", [chat_session, responses_session, messages_session])
def test_what_a_turn_shares_with_the_last_one_is_cached(
    session: Callable[[str], list[int]],
) -> None:
    engine = RecitingEngine()
    with serving(engine, text=TEXT, model=MODEL) as url:
        told = session(url)
    assert told == [turn.cached_tokens for turn in engine.turns]
    assert len(engine.turns) == NUM_TURNS
    assert len(engine.turns[0].prompt) >= LEAST_SHARED_TOKENS
    for before, turn in zip(engine.turns, engine.turns[1:], strict=False):
        shared = num_shared([*before.prompt, *before.reply], turn.prompt)
        # A reminder has the template drop the reasoning before it: less is shared then.
        assert shared >= LEAST_SHARED_TOKENS
        assert turn.cached_tokens >= shared * LEAST_SHARE
