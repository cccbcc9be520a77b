"""Reports: printed, written, no number lost."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest

from pippin.bench.report import BenchError, Outputs, Report, Table, number, read_ticks
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
    assert report_parts("test", parts).data == {"a": ["a"], "b": ["b"], "c": ["c"]}
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
