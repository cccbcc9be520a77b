"""Bars and lines as one SVG, written by hand. Knows numbers and labels, nothing of benchmarks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#c0392b", "#8a8f98", "#2b6cb0", "#2f855a", "#b7791f")
WIDTH = 760
BAR_HEIGHT = 16
LABEL_WIDTH = 300
PLOT_HEIGHT = 240
MARGIN = 60
TITLE_HEIGHT = 34
LEGEND_HEIGHT = 24
STYLE = "font-family:system-ui,sans-serif;font-size:12px;fill:#24292f"


@dataclass(frozen=True)
class Bars:
    """Horizontal bars: for each label one bar of each series, on a scale of its own."""

    title: str
    series: tuple[str, ...]
    rows: list[tuple[str, tuple[float, ...]]]
    unit: str = ""


@dataclass(frozen=True)
class Lines:
    """Curves over one x axis; `log_x` spaces it by ratios."""

    title: str
    x_label: str
    y_label: str
    series: dict[str, list[tuple[float, float]]]
    log_x: bool = False


Chart = Bars | Lines


def draw(charts: Sequence[Chart]) -> str:
    """The charts under each other, as a whole SVG document."""
    parts: list[str] = []
    top = 0.0
    for chart in charts:
        body, height = _bars(chart) if isinstance(chart, Bars) else _lines(chart)
        parts.append(f'<g transform="translate(0 {top:.0f})">{"".join(body)}</g>')
        top += height + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top:.0f}" '
        f'viewBox="0 0 {WIDTH} {top:.0f}" style="{STYLE}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _bars(chart: Bars) -> tuple[list[str], float]:
    parts = [_title(chart.title), *_legend(chart.series)]
    y = float(TITLE_HEIGHT + LEGEND_HEIGHT)
    room = WIDTH - LABEL_WIDTH - MARGIN - 30
    for label, values in chart.rows:
        largest = max((v for v in values if math.isfinite(v)), default=0.0) or 1.0
        middle = y + BAR_HEIGHT * len(values) / 2 + 4
        parts.append(_text(LABEL_WIDTH - 10, middle, label, anchor="end"))
        for value, colour in zip(values, COLOURS, strict=False):
            width = room * value / largest if math.isfinite(value) else 0.0
            parts.append(_rect(LABEL_WIDTH, y, width, BAR_HEIGHT - 2, colour))
            shown = f"{value:,.4g} {chart.unit}".strip()
            parts.append(_text(LABEL_WIDTH + width + 6, y + BAR_HEIGHT - 5, shown))
            y += BAR_HEIGHT
        y += 10
    return parts, y


def _lines(chart: Lines) -> tuple[list[str], float]:
    points = [point for curve in chart.series.values() for point in curve]
    xs = sorted({x for x, _ in points})
    top = max((y for _, y in points if math.isfinite(y)), default=0.0) or 1.0
    y_ticks = list(_round_ticks(top))
    scale_x = _Scale(xs[0], xs[-1], MARGIN, WIDTH - 30, log=chart.log_x)
    bottom = TITLE_HEIGHT + LEGEND_HEIGHT + PLOT_HEIGHT
    scale_y = _Scale(0.0, y_ticks[-1], bottom, TITLE_HEIGHT + LEGEND_HEIGHT)
    parts = [_title(chart.title), *_legend(tuple(chart.series))]
    for tick in y_ticks:
        parts.append(_line(MARGIN, scale_y(tick), WIDTH - 30, scale_y(tick), "#e1e4e8"))
        parts.append(_text(MARGIN - 6, scale_y(tick) + 4, f"{tick:g}", anchor="end"))
    few = xs if len(xs) <= 10 else [xs[0], xs[len(xs) // 2], xs[-1]]
    parts += [_text(scale_x(x), bottom + 16, f"{x:g}", anchor="middle") for x in few]
    parts.append(_text((MARGIN + WIDTH) / 2, bottom + 34, chart.x_label, anchor="middle"))
    parts.append(_text(4, TITLE_HEIGHT + LEGEND_HEIGHT - 8, chart.y_label))
    for curve, colour in zip(chart.series.values(), COLOURS, strict=False):
        places = [(scale_x(x), scale_y(y)) for x, y in curve if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
            for x, y in (places if len(places) <= 20 else [])
        ]
    return parts, bottom + 40


@dataclass(frozen=True)
class _Scale:
    """From numbers to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = (math.log(v) for v in (low, high, at))
        return self.start + (self.end - self.start) * ((at - low) / (high - low or 1.0))


def _round_ticks(top: float) -> Iterator[float]:
    """0 and up in steps of 1, 2 or 5 times a power of ten, to just past the top."""
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    for index in range(math.ceil(top / step * 0.999) + 1):
        yield index * step


def _legend(series: Sequence[str]) -> Iterator[str]:
    x = float(LABEL_WIDTH)
    for name, colour in zip(series, COLOURS, strict=False):
        yield _rect(x, TITLE_HEIGHT, 10, 10, colour)
        yield _text(x + 15, TITLE_HEIGHT + 9, name)
        x += 40 + 7 * len(name)


def _title(text: str) -> str:
    return f'<text x="12" y="22" style="font-weight:600;font-size:14px">{escape(text)}</text>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
