"""llama.cpp's `/infill`, with the requests of llama.vim and llama.vscode as they send them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from qwen35_server import prompt_text, says, serving_qwen
from scripted_engine import ScriptedEngine, say, serving

from cases import cases
from pippin.api.dialects.infill import IndentLimit
from pippin.config import ServerConfig

PREFIX, SUFFIX = "def add(a, b):\n", "\n\nprint(add(1, 2))\n"
GAP = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "prompt": "    return "}
FILES = [
    {"text": "A = 1\n", "time": 1, "filename": "a.py"},
    {"text": "B = 2\n", "time": [2, 3], "filename": "b.py"},
]
REPO = "<|repo_name|>myproject\n"
THIS = (
    f"<|file_sep|>filename\n<|fim_prefix|>{PREFIX}    return <|fim_suffix|>{SUFFIX}<|fim_middle|>"
)
TIMINGS = [
    f"timings/{phase}_{unit}"
    for phase in ("prompt", "predicted")
    for unit in ("n", "ms", "per_token_ms", "per_second")
]
LLAMA_VIM = {
    "id_slot": 0,
    **GAP,
    "input_extra": FILES,
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", *TIMINGS, "truncated", "tokens_cached"],
}
LLAMA_VIM_WARM_UP = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": FILES,
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
LLAMA_VSCODE = {
    "id_slot": 0,
    **GAP,
    "input_extra": FILES,
    "n_predict": 128,
    "n_cmpl": 1,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
    "model": "qwen",
}


def infill(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/infill", json={**GAP, **fields})


def test_llama_vims_request_gets_the_fields_that_it_names() -> None:
    with serving_qwen(says("a + b")) as (url, engine):
        reply = infill(url, **LLAMA_VIM)
    found = reply.json()
    assert list(found) == LLAMA_VIM["response_fields"]
    assert (found["content"], found["truncated"], found["tokens_cached"]) == ("a + b", False, 3)
    assert found["timings/predicted_n"] == 4
    assert '"content":"' in reply.text  # the plugin looks for these bytes before it decodes
    assert engine.submits[0].params.max_tokens == 128
    ignored = reply.headers["x-pippin-ignored"]
    assert ignored == "id_slot, samplers, t_max_prompt_ms, t_max_predict_ms"


def test_llama_vims_warm_up_generates_nothing() -> None:
    with serving_qwen(says("a + b")) as (url, engine):
        reply = infill(url, **LLAMA_VIM_WARM_UP)
        first = infill(url, **LLAMA_VIM)
    assert (reply.status_code, reply.json()) == (200, {})
    assert engine.submits[0].params.max_tokens == 1
    # Both prompts share the files, and a prefix may end behind each.
    shared = engine.submits[0].boundaries
    assert shared == engine.submits[1].boundaries
    assert engine.submits[0].token_ids[: shared[-1]] == engine.submits[1].token_ids[: shared[-1]]
    assert first.status_code == 200


def test_llama_vscode_reads_the_context_and_the_times() -> None:
    with serving_qwen(says("a + b")) as (url, _):
        reply = infill(url, **LLAMA_VSCODE).json()
    assert reply["content"] == "a + b"
    assert reply["generation_settings"]["n_ctx"] == 65_536
    assert (reply["tokens_cached"], reply["truncated"]) == (3, False)
    times = {"prompt_n", "prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms"}
    assert {*times, "predicted_per_second"} <= reply["timings"].keys()
    assert reply["timings"]["prompt_n"] == reply["tokens_evaluated"] - 3
    assert (reply["stop"], reply["stop_type"], reply["model"]) == (True, "eos", "qwen")


def test_files_are_shown_as_the_model_knows_repositories() -> None:
    with serving_qwen(says("a + b")) as (url, engine):
        infill(url, input_extra=[*FILES, {"text": "C"}])
        infill(url)
    files = "<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nB = 2\n<|file_sep|>tmp\nC"
    assert prompt_text(engine, 0) == REPO + files + THIS
    assert prompt_text(engine, 1) == REPO + THIS


def test_the_last_files_that_fit_are_kept_and_it_is_reported() -> None:
    many = [{"text": f"number {i} " * 2_000} for i in range(40)]
    with serving_qwen(says("a + b")) as (url, engine):
        reply = infill(url, input_extra=many, n_predict=500)
        huge = infill(url, input_extra=[{"text": "x" * 3_000_000}, *FILES], n_predict=500)
    assert (reply.status_code, huge.status_code) == (200, 200)
    assert reply.headers["x-pippin-ignored"] == huge.headers["x-pippin-ignored"] == "input_extra"
    shown = prompt_text(engine, 0)
    assert "number 39" in shown
    assert "number 0 " not in shown
    assert 50_000 < engine.submits[0].prompt_len <= 65_536 - 500
    assert prompt_text(engine, 1).startswith(f"{REPO}<|file_sep|>a.py")


def test_several_choices_are_a_list() -> None:
    with serving_qwen(says("a + b")) as (url, engine):
        replies = infill(url, n_cmpl=3, seed=5, return_tokens=True).json()
    assert [reply["index"] for reply in replies] == [0, 1, 2]
    assert [reply["content"] for reply in replies] == ["a + b"] * 3
    assert all(len(reply["tokens"]) == 4 for reply in replies)
    assert {submit.params.seed for submit in engine.submits} == {5, 6, 7}


def test_a_stream_ends_with_the_counts() -> None:
    with serving_qwen(says("a + b")) as (url, _):
        lines = infill(url, stream=True).text.strip().split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["content"] for event in events) == "a + b"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_predicted"] == 4


@pytest.mark.parametrize(
    ("fields", "stop_type", "word"),
    [
        ({"n_predict": 2}, "limit", ""),
        ({"stop": ["+"]}, "word", "+"),
        ({"n_predict": -1, "seed": -1}, "eos", ""),
    ],
)
def test_why_a_reply_ended_is_named(fields: dict[str, Any], stop_type: str, word: str) -> None:
    with serving_qwen(says("a + b")) as (url, engine):
        reply = infill(url, **fields).json()
    assert (reply["stop_type"], reply["stopping_word"]) == (stop_type, word)
    assert engine.submits[0].params.seed is None


def test_a_reply_ends_before_a_line_that_is_indented_less() -> None:
    code = "a + b\n\n    # more\n  less\n    x"
    with serving_qwen(says(code)) as (url, _):
        assert infill(url, n_indent=4).json()["content"] == "a + b\n\n    # more"
        assert infill(url, n_indent=2).json()["content"] == code
        lines = infill(url, n_indent=4, stream=True).text.strip().split("\n\n")
    contents = [json.loads(line.removeprefix("data: "))["content"] for line in lines]
    assert "".join(contents) == "a + b\n\n    # more"


def test_indentation_is_measured_wherever_the_text_is_split() -> None:
    text, least = "a\n    b\n\n\t\t\t\tc\n \nd\n     e", 4
    whole = IndentLimit(least)
    expected = whole.feed(text) + whole.close()
    assert expected == "a\n    b\n\n\t\t\t\tc\n "
    for cut in range(len(text)):
        limit = IndentLimit(least)
        assert limit.feed(text[:cut]) + limit.feed(text[cut:]) + limit.close() == expected
    unfinished = IndentLimit(least)
    assert unfinished.feed("a\n  ") + unfinished.close() == "a\n  "


@cases(
    ("fields", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_suffix": 5}, "input_suffix"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra"),
        ({"input_extra": [{"text": "a", "filename": 5}]}, "input_extra"),
        ({"input_extra": [{"text": "a"}] * 10_001}, "input_extra"),
        ({"input_suffix": "x" * 2_000_000}, "input_suffix"),
        ({"prompt": "x" * 2_000_000}, "input_prefix"),
        ({"prompt": "a " * 65_536}, "input_prefix"),
        ({"n_predict": 70_000}, "n_predict"),
        ({"mirostat": 2}, "mirostat"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"response_fields": ["a"] * 65}, "response_fields"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with serving_qwen(says("")) as (url, engine):
        reply = infill(url, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert engine.submits == []


def test_a_model_without_marks_refuses_it() -> None:
    with serving(ScriptedEngine(say("a"))) as url:
        reply = infill(url)
    assert reply.status_code == 400
    assert "has no tokens for filling in the middle" in reply.json()["error"]["message"]


def test_strict_fields_refuse_what_would_be_ignored() -> None:
    with serving_qwen(says("a"), config=ServerConfig(strict_fields=True)) as (url, _):
        assert infill(url, id_slot=0).json()["error"]["param"] == "id_slot"
        assert infill(url).status_code == 200
