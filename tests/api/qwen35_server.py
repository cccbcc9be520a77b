"""A server that speaks with Qwen3.5's tokenizer and template, on an engine that plays a script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import openai
from scripted_engine import Script, ScriptedEngine, say_tokens, serving

from call_texts import write_calls
from pippin.api.model_info import ModelInfo
from pippin.config import ServerConfig
from pippin.decode.compile import CompiledGrammar, Vocabulary
from pippin.engine.grammar_zygote import vocabulary_of
from qwen35 import END_OF_TURN, load_qwen35

TEXT = load_qwen35()
MODEL = ModelInfo(name="qwen", max_len=65_536, vocab_size=248_320, created_s=1)
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
ARGUMENTS = {"city": "Tokyo", "days": 3}
CALL = write_calls("qwen3_coder", [("get_weather", ARGUMENTS)])
TWO_CALLS = write_calls(
    "qwen3_coder", [("get_weather", ARGUMENTS), ("get_weather", {"city": "Rome"})]
)
THOUGHT = "Let me think.\n</think>\n\n"


def says(text: str) -> Script:
    """One token at a time; the template has opened the reasoning."""
    return say_tokens([*TEXT.tokenizer.encode(text, add_special_tokens=False), END_OF_TURN])


@contextmanager
def serving_qwen(
    *scripts: Script, config: ServerConfig | None = None
) -> Iterator[tuple[str, ScriptedEngine]]:
    engine = ScriptedEngine(*scripts)
    with serving(engine, config, text=TEXT, model=MODEL) as url:
        yield url, engine


@contextmanager
def openai_client(
    *scripts: Script, config: ServerConfig | None = None, key: str = "none"
) -> Iterator[tuple[Any, ScriptedEngine]]:
    with (
        serving_qwen(*scripts, config=config) as (url, engine),
        openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client, engine


@cache
def vocabulary() -> Vocabulary:
    return vocabulary_of(TEXT.tokenizer, MODEL.vocab_size)


def allows(grammar: CompiledGrammar, text: str) -> bool:
    """Whether a text may be a whole reply."""
    tokens = [*TEXT.tokenizer.encode(text, add_special_tokens=False), END_OF_TURN]
    return grammar._matcher.validate_tokens(tokens) == len(tokens)


def prompt_text(engine: ScriptedEngine, number: int = -1) -> str:
    """What the engine was asked to continue."""
    tokens = engine.submits[number].token_ids
    return b"".join(map(TEXT.tokenizer.token_bytes, tokens)).decode()
