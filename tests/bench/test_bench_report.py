"""Reports: printed, written, no number lost; prompts and schemas of the benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundled import BUNDLED_PATH
from pippin.bench.report import (
    Outputs,
    Report,
    Table,
    number,
    percentile,
)
from pippin.text.tokenizer import Tokenizer
from prompts import Prompts, count_with
from shared import verdict


def test_a_report_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("Speed", ("what", "ms"), [("a", "1.0"), ("b", "2.0")])
    outputs = Outputs(tmp_path / "r.json", tmp_path / "r.md")
    Report("test", [table], {"numbers": [1.5]}, ["A note."]).publish(outputs)
    assert "Speed" in capsys.readouterr().out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["benchmark"] == "test"
    assert written["numbers"] == [1.5]
    assert written["machine"]["cpus"] >= 1
    assert "| b | 2.0 |" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(("value", "most"), [(1.3, "met"), (1.31, "missed")])
def test_a_verdict_names_its_target(value: float, most: str) -> None:
    assert verdict(value, "{:g}x", at_most=1.3) == f"at most 1.3x: {most}"
    least = "met" if most == "met" else "missed"
    assert verdict(2.6 - value, "{:g}", at_least=1.3) == f"at least 1.3: {least}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1234.5, "1,234"), (99.94, "99.9"), (9.876, "9.88"), (0.5, "0.50"), (math.nan, "–")],
)
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert number(value) == shown


finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, share * 100))
    assert percentile(values, share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 24, 64, 600, 2000])
def test_a_prompt_has_exactly_the_tokens_that_the_server_will_count(num_tokens: int) -> None:
    prompts = Prompts("exact", count_with(BUNDLED_PATH))
    tokenizer = Tokenizer.load(BUNDLED_PATH)
    for _ in range(3):
        assert len(tokenizer.encode(prompts.text(num_tokens))) == num_tokens
