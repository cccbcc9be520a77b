"""The comparison's arithmetic, and the checkpoint that both servers read."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from transformers import AutoTokenizer

from bundled import BUNDLED_PATH
from compare import (
    OURS,
    THEIRS,
    Measure,
    Scenario,
    choose,
    compare,
    summarize,
)
from pippin.bench.report import BenchError
from pippin.text.tokenizer import Tokenizer
from processes import environment
from servers import write_endless_copy


def test_a_target_is_of_the_advantage_or_of_our_own_number() -> None:
    faster = Measure("time", "s", times_better=3.0)
    assert faster.verdict(10, 30) == "at least 3x: met"
    assert faster.verdict(10, 29) == "at least 3x: missed"
    bounded = Measure("gap", "x", at_most=5.0)
    assert bounded.verdict(5.0, 1.0) == "ours at most 5: met"
    assert bounded.verdict(5.1, 900.0) == "ours at most 5: missed"
    assert Measure("gap", "x").verdict(1, 2) == ""


def test_what_is_wanted_of_the_bundled_model_is_not_wanted_of_every_other() -> None:
    targets = {
        bundled: [
            m.times_better
            for s in choose(["prefill", "decode-1"], bundled=bundled)
            for m in s.measures
        ]
        for bundled in (True, False)
    }
    assert targets == {True: [2.5, None, 1.6, 1.0], False: [None, None, 1.3, 1.0]}


def test_the_table_shows_medians_and_ratios() -> None:
    scenario: Scenario = choose(["prefill"])[0]
    ours = [{"prefill": rate, "TTFT": 2000 / rate} for rate in (1000.0, 2000.0, 900.0)]
    theirs = [{"prefill": rate, "TTFT": 2000 / rate} for rate in (500.0, 400.0, 250.0)]
    report = summarize("a model", [scenario], {"prefill": {OURS: ours, THEIRS: theirs}}, [])
    assert report.tables[0].title.startswith("a model: Pippin and mlx-lm")
    assert report.tables[0].rows == [
        (scenario.title, "prefill, tok/s", "1,000", "400", "2.50x", "at least 2.5x: met"),
        ("", "TTFT, s", "2.00", "5.00", "2.50x", ""),
    ]
    assert report.data["scenarios"]["prefill"]["rounds"][OURS] == ours
    assert report.data["scenarios"]["prefill"]["advantage"] == {"prefill": 2.5, "TTFT": 2.5}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("copy")
    write_endless_copy(BUNDLED_PATH, path, float32=True)
    return path


def test_the_copy_holds_the_same_numbers_in_float32(copy: Path) -> None:
    before = mx.load(str(BUNDLED_PATH / "model.safetensors"))
    after = mx.load(str(copy / "model.safetensors"))
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert before.keys() == after.keys()
    for name, weights in before.items():
        assert after[name].dtype == mx.float32
        assert mx.array_equal(weights.astype(mx.float32), after[name])


def test_nothing_in_the_copy_ends_a_reply_and_every_token_has_text(copy: Path) -> None:
    """One without comes as no event, and two gaps between tokens would count as one."""
    original = Tokenizer.load(BUNDLED_PATH)
    assert original.eos_ids
    assert Tokenizer.load(copy).eos_ids == ()
    (end,) = original.encode("<|im_end|>")
    assert original.decode([end]) == ""
    assert Tokenizer.load(copy).special_ids == frozenset()
    theirs = AutoTokenizer.from_pretrained(copy)
    assert theirs.encode("<|im_end|>") == [end]
    assert theirs.decode([end], skip_special_tokens=True) == "<|im_end|>"


def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "m.safetensors"), {"w": mx.zeros((2, 2), mx.uint32)})
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(BenchError, match=r"m\.safetensors: w is U32"):
        write_endless_copy(tmp_path, target, float32=True)


@pytest.mark.slow
def test_both_servers_answer_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    monkeypatch.setattr("scenarios.PROMPT_TOKENS", 50)
    report = compare(only=["prefill", "decode-1"], rounds=1)
    for scenario, measure in (("prefill", "prefill"), ("decode-1", "decode")):
        rounds = report.data["scenarios"][scenario]["rounds"]
        assert all(rounds[name][0][measure] > 0 for name in (OURS, THEIRS))
