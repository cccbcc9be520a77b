"""`suffix` of `/v1/completions`: the text between two others, where a model has tokens for it."""

from __future__ import annotations

from typing import Any

import httpx
import ollama
import openai
import pytest
import tokenizers
from qwen35_server import prompt_text, says, serving_qwen
from scripted_engine import ScriptedEngine, say, serving
from tokenizers import AddedToken, decoders, models, normalizers

from pippin.text.bundle import FillInMiddle
from pippin.text.tokenizer import Tokenizer
from qwen35 import load_qwen35

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"


def complete(url: str, **fields: Any) -> httpx.Response:
    body = {"model": "qwen", "prompt": PREFIX, "suffix": SUFFIX, **fields}
    return httpx.post(f"{url}/v1/completions", json=body)


def test_the_official_client_gets_the_text_between_two_others() -> None:
    with (
        serving_qwen(says("a + b")) as (url, engine),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        reply = client.completions.create(model="qwen", prompt=PREFIX, suffix=SUFFIX)
    assert reply.choices[0].text == "a + b"
    assert prompt_text(engine) == f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"


def test_a_mark_ends_the_reply_unless_ends_are_ignored() -> None:
    marks = {load_qwen35().tokenizer.added_id(f"<|{name}|>") for name in ("fim_pad", "file_sep")}
    with serving_qwen(says("a + b")) as (url, engine):
        complete(url)
        complete(url, ignore_eos=True)
    assert marks <= set(engine.submits[0].stop_ids)
    assert engine.submits[1].stop_ids == []


def test_token_ids_and_several_prompts_have_the_same_suffix() -> None:
    tokens = load_qwen35().tokenizer.encode(PREFIX)
    with serving_qwen(says("a + b")) as (url, engine):
        complete(url, prompt=tokens)
        complete(url, prompt=["x", PREFIX])
    assert prompt_text(engine, 0) == prompt_text(engine, 2)
    assert prompt_text(engine, 1).startswith("<|fim_prefix|>x<|fim_suffix|>")


def test_ollamas_client_inserts_as_well() -> None:
    with serving_qwen(says("a + b")) as (url, engine), ollama.Client(url) as client:
        assert "insert" in (client.show("qwen").capabilities or [])
        reply = client.generate("qwen", PREFIX, suffix=SUFFIX)
        beside = {"model": "qwen", "prompt": PREFIX, "suffix": SUFFIX, "system": "Be brief."}
        refused = httpx.post(f"{url}/api/generate", json=beside)
    assert reply.response == "a + b"
    assert prompt_text(engine) == f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    assert (refused.status_code, refused.json()["error"].split()[0]) == (400, "system")


def test_an_empty_suffix_asks_for_nothing() -> None:
    with serving_qwen(says("a")) as (url, engine):
        assert complete(url, suffix="").status_code == 200
    assert prompt_text(engine) == PREFIX


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "suffix"),
        ({"suffix": "x" * 2_000_000}, "suffix"),
        ({"prompt": "x" * 2_000_000}, "prompt"),
        ({"prompt": "a " * 65_536}, "prompt"),
        ({"suffix": ["a"]}, "suffix"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with serving_qwen(says("")) as (url, engine):
        reply = complete(url, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert engine.submits == []


def test_a_model_without_such_tokens_refuses_it_by_name() -> None:
    with serving(ScriptedEngine(say("a"))) as url:
        reply = complete(url, model="stories").json()["error"]
    assert (reply["param"], reply["code"]) == ("suffix", "unsupported_parameter")


def toy(*marks: str, spaces: bool = False) -> Tokenizer:
    """A tokenizer of single characters and marks; `spaces`: it puts one before a text."""
    letters = {letter: id for id, letter in enumerate("▁abc\n\u263a")}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.decoder = decoders.Fuse()
    if spaces:
        backend.normalizer = normalizers.Prepend("▁")
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    "marks",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
        ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ],
)
def test_the_marks_of_each_family_stand_around_the_texts(marks: tuple[str, ...]) -> None:
    tokenizer = toy(*marks)
    fill = FillInMiddle.detect(tokenizer)
    assert fill is not None
    begin, hole, end = map(tokenizer.added_id, marks)
    assert fill.gap("ab", "c", tokenizer) == [begin, 1, 2, hole, 3, end]


def test_no_space_is_put_before_the_suffix() -> None:
    tokenizer = toy("▁<PRE>", "▁<SUF>", "▁<MID>", spaces=True)
    fill = FillInMiddle.detect(tokenizer)
    assert fill is not None
    assert fill.gap("ab", "c", tokenizer)[1:-1] == [0, 1, 2, fill.before_suffix, 3]


def test_text_that_looks_like_a_mark_is_none() -> None:
    assert FillInMiddle.detect(toy("<|fim_prefix|>", "<|fim_middle|>")) is None
