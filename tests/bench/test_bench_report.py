"""Reports: printed, written, no number lost; prompts and schemas of the benchmarks."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundled import BUNDLED_PATH
from pippin.bench.report import (
    BenchError,
    Outputs,
    Report,
    Spread,
    Table,
    median,
    number,
    percentile,
    ratio,
    read_ticks,
)
from pippin.text.tokenizer import Tokenizer
from prompts import Prompts, count_with
from shared import Part, report_parts, verdict


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


def test_parts_are_measured_in_order_and_by_name() -> None:
    def part(name: str) -> Part:
        return Table(name, ("x",), []), [name]

    parts = {name: partial(part, name) for name in ("a", "b", "c")}
    assert report_parts("test", parts, None).data == {"a": ["a"], "b": ["b"], "c": ["c"]}
    chosen = report_parts("test", parts, ["c", "a"])
    assert [table.title for table in chosen.tables] == ["a", "c"]
    with pytest.raises(BenchError, match="no part 'd'; there are a, b, c"):
        report_parts("test", parts, ["a", "d"])


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


def test_stolen_time_is_a_share_of_all_cpu_time(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    readings = []
    for line in ("cpu 10 0 10 80 0 0 0 0 0 0", "cpu 30 0 20 120 0 5 5 20 30 0"):
        stat.write_text(f"{line}\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
        readings.append(read_ticks(stat))
    before, after = readings
    assert before is not None
    assert after is not None
    assert after.stolen_since(before) == 0.2
    assert read_ticks(tmp_path / "nothing") is None


finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, share * 100))
    assert percentile(values, share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_nothing_measured_is_not_a_number() -> None:
    assert math.isnan(median([]))
    assert math.isnan(Spread.of([]).max)
    assert math.isnan(ratio(1.0, 0.0))


def test_a_spread_keeps_the_worst() -> None:
    spread = Spread.of([1.0] * 99 + [50.0])
    assert (spread.count, spread.p50, spread.max) == (100, 1.0, 50.0)
    assert 1.0 < spread.p99 < 50.0


@pytest.mark.parametrize("num_tokens", [1, 24, 64, 600, 2000])
def test_a_prompt_has_exactly_the_tokens_that_the_server_will_count(num_tokens: int) -> None:
    prompts = Prompts("exact", count_with(BUNDLED_PATH))
    tokenizer = Tokenizer.load(BUNDLED_PATH)
    for _ in range(3):
        assert len(tokenizer.encode(prompts.text(num_tokens))) == num_tokens


def test_a_word_that_takes_two_tokens_is_made_up_for() -> None:
    def count(text: str) -> int:
        return sum(2 if word in ("fox", "brave") else 1 for word in text.replace(".", " .").split())

    prompts = Prompts("long words", count)
    assert [count(prompts.text(n)) for n in (50, 200)] == [50, 200]


def test_without_a_tokenizer_words_and_full_stops_count() -> None:
    assert len(Prompts("words").text(90).replace(".", " .").split()) == 90


def test_prompts_part_within_the_first_grid_block() -> None:
    prompts = Prompts("distinct", count_with(BUNDLED_PATH))
    tokenizer = Tokenizer.load(BUNDLED_PATH)
    starts = {tuple(tokenizer.encode(prompts.text(64))) for _ in range(50)}
    assert len(starts) == 50


def test_a_seed_fixes_the_prompts() -> None:
    assert Prompts("a").text(50) == Prompts("a").text(50)
    assert Prompts("a").text(50) != Prompts("b").text(50)
    assert Prompts("a").question() == Prompts("a").question()
