"""Reports and pictures: right shapes, well-formed, no number lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pippin.bench.results.plot import Bar, Bars, Chart, Goal, Lines, draw
from pippin.bench.results.report import Outputs, Report, Table, number
from pippin.bench.results.scales import Scale, ticks
from pippin.bench.results.stolen import read_ticks

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [Bar("a < b", (1.0, 2.0), "one & two"), Bar("none", (math.nan, 3.0))]
BARS = Bars("Us & <them>", "seconds, all told", ("us", "them"), ROWS, unit=" s")
LINES = Lines(
    "Growth",
    "rows",
    "ms",
    {"a": [(1, 1.0), (64, 9.5)], "b": [(1, math.nan)]},
    log_x=True,
    target=Goal(5.0, "target: at most 5"),
)


def make_report(*charts: Chart) -> Report:
    table = Table("Speed", ("what", "ms"), [("a", "1.0"), ("b", "2.0")])
    return Report("test", [table], charts, {"numbers": [1.5]}, ["A note."])


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_picture_is_well_formed_and_names_everything() -> None:
    shown = set(texts(draw([BARS, LINES])))
    assert {"Us & <them>", "a < b", "us", "them", "seconds, all told"} <= shown  # title to axis
    assert {"1 s (one & two)", "2 s (one & two)", "– s", "3 s"} <= shown  # values
    assert {"Growth", "rows", "ms", "64", "9.5", "target: at most 5"} <= shown


def bar_widths(chart: Bars) -> list[float]:
    rects = list(ElementTree.fromstring(draw([chart])).iter(f"{SVG}rect"))
    return [float(r.get("width", "")) for r in rects if r.get("height") == "14.0"]


def test_bars_are_as_long_as_their_values() -> None:
    one, two, nothing, three = bar_widths(BARS)
    assert two == pytest.approx(2 * one, abs=0.2)
    assert three == pytest.approx(3 * one, abs=0.2)
    assert nothing == 0.0


def test_bars_of_ratios_start_at_one_and_mirror() -> None:
    rows = [Bar("better", (8.0,)), Bar("worse", (1 / 8,)), Bar("alike", (1.0,))]
    better, worse, alike = bar_widths(Bars("t", "x", ("a",), rows, log_x=True))
    assert better == pytest.approx(worse, abs=0.2)
    assert better > 50
    assert alike == 0.0


def test_a_target_is_a_dashed_line_where_its_value_is() -> None:
    root = ElementTree.fromstring(draw([LINES]))
    dashed = [line for line in root.iter(f"{SVG}line") if line.get("stroke-dasharray")]
    _, across = dashed  # the other is in the legend
    levels = {node.text: float(node.get("y", "")) - 4 for node in root.iter(f"{SVG}text")}
    at = (levels["4"] + levels["6"]) / 2  # of the axis
    assert float(across.get("y1", "")) == pytest.approx(at, abs=0.2)


@pytest.mark.parametrize(
    ("values", "log", "marks"),
    [
        ([0.0, 9.5], False, [0, 2, 4, 6, 8, 10]),
        ([0.0, 0.03], False, [0, 0.01, 0.02, 0.03]),
        ([0.9, 7.0], True, [0.5, 1, 2, 5, 10]),
        ([3.0, 40_000.0], True, [1, 10, 100, 1000, 10_000, 100_000]),
        ([1.0, 1.0], True, [1, 2]),
        ([0.0], False, [0, 1]),
    ],
)
def test_an_axis_has_round_marks_around_its_values(
    values: list[float], log: bool, marks: list[float]
) -> None:
    assert ticks(values, log=log) == pytest.approx(marks)


def test_a_logarithmic_axis_gives_equal_ratios_equal_room() -> None:
    scale = Scale([1.0, 100.0], 0.0, 200.0, log=True)
    assert [scale(value) for value in (1.0, 10.0, 100.0)] == pytest.approx([0.0, 100.0, 200.0])


@pytest.mark.parametrize("top", [0.003, 0.5, 1.0, 9.5, 10.0, 99.0, 12345.0])
def test_every_point_of_a_line_lies_on_the_page(top: float) -> None:
    root = ElementTree.fromstring(draw([Lines("t", "x", "y", {"a": [(1, top), (2, top / 7)]})]))
    height = float(root.get("height", "0"))
    points = list(root.iter(f"{SVG}circle"))
    assert len(points) == 2
    assert all(0 < float(p.get("cy", "")) < height for p in points)


def test_a_curve_of_one_point_is_drawn() -> None:
    assert "5" in texts(draw([Lines("t", "x", "y", {"a": [(5, 0.0)]}, log_x=True)]))
    assert "5" in texts(draw([Lines("t", "x", "y", {"a": [(5, math.nan)]}, log_y=True)]))


def test_nothing_measured_has_no_place_on_a_logarithmic_axis() -> None:
    bars = Bars("t", "ms", ("a",), [Bar("none", (0.0,)), Bar("some", (50.0,))], log_x=True)
    none, some = bar_widths(bars)
    assert none == 0.0
    assert some > 50
    lines = Lines("t", "x", "y", {"a": [(1, 0.0), (2, 5.0)]}, log_y=True)
    assert len(list(ElementTree.fromstring(draw([lines])).iter(f"{SVG}circle"))) == 1


def test_a_report_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = Outputs(tmp_path / "r.json", tmp_path / "r.svg", tmp_path / "r.md")
    make_report(BARS).publish(outputs)
    assert "Speed" in capsys.readouterr().out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["benchmark"] == "test"
    assert written["numbers"] == [1.5]
    assert written["machine"]["cpus"] >= 1
    assert "| b | 2.0 |" in (tmp_path / "r.md").read_text()
    assert texts((tmp_path / "r.svg").read_text())


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
