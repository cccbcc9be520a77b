"""Reports and pictures: right shapes, well-formed, no number lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pippin.bench.plot import Bars, Chart, Lines, draw
from pippin.bench.report import Outputs, Report, Table, number

SVG = "{http://www.w3.org/2000/svg}"
BARS = Bars("Us & <them>", ("us", "them"), [("a < b", (1.0, 2.0)), ("none", (math.nan, 3.0))])
LINES = Lines("Growth", "rows", "ms", {"a": [(1, 1.0), (64, 9.5)], "b": [(1, math.nan)]}, True)


def make_report(*charts: Chart) -> Report:
    table = Table("Speed", ("what", "ms"), [("a", "1.0"), ("b", "2.0")])
    return Report("test", [table], charts, {"numbers": [1.5]}, ["A note."])


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_picture_is_well_formed_and_names_everything() -> None:
    shown = texts(draw([BARS, LINES]))
    assert {"Us & <them>", "a < b", "us", "them", "Growth", "rows", "ms", "64"} <= set(shown)


def test_bars_are_as_long_as_their_values() -> None:
    root = ElementTree.fromstring(draw([BARS]))
    widths = [float(r.get("width", "")) for r in root.iter(f"{SVG}rect") if r.get("x") == "300.0"]
    legend, *bars = widths
    assert legend == 10.0
    assert bars[0] * 2 == pytest.approx(bars[1], abs=0.2)
    assert bars[2] == 0.0
    assert bars[3] == bars[1]


@pytest.mark.parametrize("top", [0.003, 0.5, 1.0, 9.5, 10.0, 99.0, 12345.0])
def test_every_point_of_a_line_lies_on_the_page(top: float) -> None:
    root = ElementTree.fromstring(draw([Lines("t", "x", "y", {"a": [(1, top), (2, top / 7)]})]))
    height = float(root.get("height", "0"))
    points = list(root.iter(f"{SVG}circle"))
    assert len(points) == 2
    assert all(0 < float(p.get("cy", "")) < height for p in points)


def test_a_curve_of_one_point_is_drawn() -> None:
    ElementTree.fromstring(draw([Lines("t", "x", "y", {"a": [(5, 0.0)]}, log_x=True)]))


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
