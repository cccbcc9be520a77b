"""Bars and curves as one SVG, written by hand. Knows numbers and labels, nothing of benchmarks.

Every chart has axes with units, a legend, and each value beside its mark. A target is a dashed
line. Only plain attributes, a font that is everywhere and a white ground: it looks the same in a
browser, on GitHub and in print.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from xml.sax.saxutils import escape

from pippin.bench.results.scales import Scale, ticks

COLOURS = ("#0969da", "#8a8f98", "#bf3989", "#1a7f37", "#9a6700")
TARGET_COLOUR = "#cf222e"
GRID_COLOUR = "#d8dee4"
WIDTH = 760
LEFT, RIGHT = 76, 44
BAR_LABEL_WIDTH = 270
NOTE_WIDTH = 200  # room for values to the right of bars
BAR_HEIGHT = 16
PLOT_HEIGHT = 220
TITLE_HEIGHT = 34
LEGEND_HEIGHT = 30
AXIS_HEIGHT = 44
FONT = 'font-family="Helvetica,Arial,DejaVu Sans,sans-serif" font-size="12" fill="#24292f"'
LABELLED_POINTS = 12  # a curve with more has no room for numbers


@dataclass(frozen=True)
class Goal:
    """A value to reach, drawn across the chart."""

    value: float
    label: str


@dataclass(frozen=True)
class Bar:
    label: str
    values: tuple[float, ...]  # one for each series
    note: str = ""  # beside the value


@dataclass(frozen=True)
class Bars:
    """Horizontal bars on one axis; on a logarithmic one they start at 1."""

    title: str
    x_label: str
    series: tuple[str, ...]
    rows: list[Bar]
    unit: str = ""  # straight behind each value
    log_x: bool = False
    target: Goal | None = None


@dataclass(frozen=True)
class Lines:
    """Curves over one x axis. Logarithmic axes need values above 0."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]
    log_x: bool = False
    log_y: bool = False
    target: Goal | None = None


Chart = Bars | Lines


def draw(charts: Sequence[Chart]) -> str:
    """The charts under each other, as a whole SVG document."""
    parts: list[str] = []
    top = 0.0
    for chart in charts:
        body, height = _bars(chart) if isinstance(chart, Bars) else _lines(chart)
        parts.append(f'<g transform="translate(0 {top:.0f})">{"".join(body)}</g>\n')
        top += height + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top:.0f}" '
        f'viewBox="0 0 {WIDTH} {top:.0f}" {FONT}>\n'
        f'<rect width="{WIDTH}" height="{top:.0f}" fill="#ffffff"/>\n{"".join(parts)}</svg>\n'
    )


def _bars(chart: Bars) -> tuple[list[str], float]:
    first = float(TITLE_HEIGHT + LEGEND_HEIGHT)
    everything = chain.from_iterable(row.values for row in chart.rows)
    values = [value for value in everything if _drawable(value, log=chart.log_x)]
    marks = [*values, chart.target.value] if chart.target else values
    x_ticks = ticks([*marks, 1.0] if chart.log_x else [*marks, 0.0], log=chart.log_x)
    scale = Scale(x_ticks, BAR_LABEL_WIDTH, WIDTH - NOTE_WIDTH, log=chart.log_x)
    origin = scale(1.0 if chart.log_x else 0.0)
    parts: list[str] = []
    y = first
    for row in chart.rows:
        middle = y + BAR_HEIGHT * len(row.values) / 2 + 3
        parts.append(_text(BAR_LABEL_WIDTH - 10, middle, row.label, anchor="end"))
        for value, colour in zip(row.values, COLOURS, strict=False):
            end = scale(value) if _drawable(value, log=chart.log_x) else origin
            parts.append(_rect(min(origin, end), y, abs(end - origin), BAR_HEIGHT - 2, colour))
            note = f" ({row.note})" if row.note else ""
            shown = f"{_short(value)}{chart.unit}{note}"
            parts.append(_text(max(origin, end) + 6, y + BAR_HEIGHT - 5, shown, halo=True))
            y += BAR_HEIGHT
        y += 10
    grid = [
        part
        for tick in x_ticks
        for part in (
            _line(scale(tick), first - 4, scale(tick), y, GRID_COLOUR),
            _text(scale(tick), y + 16, _short(tick), anchor="middle"),
        )
    ]
    if chart.target:
        at = scale(chart.target.value)
        grid.append(_line(at, first - 4, at, y, TARGET_COLOUR, dashed=True))
    head = [_title(chart.title), *_legend(chart.series, chart.target)]
    middle = (BAR_LABEL_WIDTH + WIDTH - NOTE_WIDTH) / 2
    axis = _text(middle, y + 34, chart.x_label, anchor="middle")
    return [*head, *grid, *parts, axis], y + AXIS_HEIGHT


def _lines(chart: Lines) -> tuple[list[str], float]:
    points = [point for curve in chart.series.values() for point in curve]
    xs = sorted({x for x, _ in points})
    target = [chart.target.value] if chart.target else []
    ys = [y for _, y in points if _drawable(y, log=chart.log_y)] + target or [1.0]
    y_ticks = ticks(ys if chart.log_y else [*ys, 0.0], log=chart.log_y)
    top = TITLE_HEIGHT + LEGEND_HEIGHT
    bottom = top + PLOT_HEIGHT
    scale_x = Scale(xs, LEFT, WIDTH - RIGHT, log=chart.log_x)
    scale_y = Scale(y_ticks, bottom, top, log=chart.log_y)
    parts = [_title(chart.title), *_legend(tuple(chart.series), chart.target)]
    for tick in y_ticks:
        parts.append(_line(LEFT, scale_y(tick), WIDTH - RIGHT, scale_y(tick), GRID_COLOUR))
        parts.append(_text(LEFT - 8, scale_y(tick) + 4, _short(tick), anchor="end"))
    few = xs if len(xs) <= 16 else [xs[0], xs[len(xs) // 2], xs[-1]]
    parts += [_text(scale_x(x), bottom + 16, _short(x), anchor="middle") for x in few]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, chart.x_label, anchor="middle"))
    parts.append(_upright(16, (top + bottom) / 2, chart.y_label))
    if chart.target:
        at = scale_y(chart.target.value)
        parts.append(_line(LEFT, at, WIDTH - RIGHT, at, TARGET_COLOUR, dashed=True))
    for index, (curve, colour) in enumerate(zip(chart.series.values(), COLOURS, strict=False)):
        shown = [(x, y) for x, y in curve if _drawable(y, log=chart.log_y)]
        label_offset = 18 if index % 2 else -8  # neighbours' numbers above and below
        parts += _curve(shown, scale_x, scale_y, colour, label_offset)
    return parts, bottom + AXIS_HEIGHT


def _curve(
    points: Sequence[tuple[float, float]],
    scale_x: Scale,
    scale_y: Scale,
    colour: str,
    label_offset: float,
) -> Iterator[str]:
    places = [(scale_x(x), scale_y(y)) for x, y in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for (x, y), (_, value) in zip(places, points, strict=True):
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        if len(points) <= LABELLED_POINTS:
            label = _short(value)
            yield _text(x, y + label_offset, label, anchor="middle", colour=colour, halo=True)


def _drawable(value: float, *, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def _short(value: float) -> str:
    """Three digits, as in tables; ticks without trailing zeros."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _legend(series: Sequence[str], target: Goal | None) -> Iterator[str]:
    x, middle = float(LEFT), TITLE_HEIGHT + 5
    for name, colour in zip(series, COLOURS, strict=False):
        yield _rect(x, middle - 5, 10, 10, colour)
        yield _text(x + 15, middle + 4, name)
        x += 40 + 7 * len(name)
    if target:
        yield _line(x, middle, x + 18, middle, TARGET_COLOUR, dashed=True)
        yield _text(x + 23, middle + 4, target.label)


def _title(text: str) -> str:
    return f'<text x="12" y="22" font-weight="600" font-size="14">{escape(text)}</text>'


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = "", *, halo: bool = False
) -> str:
    """`halo`: keeps lines that run through the text away from it."""
    look = f' fill="{colour}"' if colour else ""
    look += ' stroke="#ffffff" stroke-width="3" paint-order="stroke"' if halo else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{escape(text)}</text>'


def _upright(x: float, y: float, text: str) -> str:
    turn = f'transform="rotate(-90 {x:.1f} {y:.1f})"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" {turn}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}"{dash}/>'
