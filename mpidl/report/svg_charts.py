"""Draw curves as SVG, for pages about runs and for notebooks: axes, lines, points and a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from mpidl.report.elements import element

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

SIZE = 720, 270  # pixels of a chart
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40  # margins in pixels
MAX_POINTS = 600  # points of a line; more points would not be visible
MAX_MARKS = 60  # maximum number of marks; a line with more points has no marks
LOG_RATIO = 20  # above this ratio of the largest to the smallest value, an axis is logarithmic
# These colours are distinguishable with colour blindness and on paper.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5c00", "#56b4e9", "#e69f00", "#555555")
# {style of a line: (attributes of the line, CSS of its entry in the legend)}
STYLES: dict[str, tuple[dict[str, str], str]] = {
    "line": ({"stroke_width": "2"}, "2.5px solid"),
    "dashed": ({"stroke_width": "2", "stroke_dasharray": "6 4"}, "2.5px dashed"),
    "faint": ({"stroke_width": "1", "opacity": "0.4"}, "1.5px solid; opacity: 0.45"),
    "points": ({"stroke_width": "0"}, "5px dotted"),
}
ENTRY = "display: inline-block; width: 20px; margin: 0 6px 4px 16px; border-top: "

Point: TypeAlias = tuple[float, float]


class Line(NamedTuple):
    """A line of a chart."""

    name: str  # name in the legend; "" for a line without an entry
    # The points, in ascending order of x. Points that are not finite are omitted.
    points: Sequence[Point]
    colour: str
    style: str = "line"  # style: solid with marks, dashed with marks, thin and light, or only marks


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    log: bool = False,
    unit: str = "",
    ends: tuple[float | None, float | None] = (None, None),
    size: tuple[int, int] = SIZE,
    x_label: str = "iteration",
) -> Element:
    """Draw lines against an integer, by default the iteration, as an SVG with its legend that needs
    no style sheet. Lines without points are omitted. With `log`, the vertical axis is logarithmic
    if the values differ by more than a factor of 20. `unit` follows its numbers. `ends` are the
    largest values of the two axes; None selects the largest value in the data.
    """
    columns = [np.array(line.points, float).reshape(-1, 2).T for line in lines]
    lines = [line._replace(points=visible(*xy)) for line, xy in zip(lines, columns, strict=True)]
    lines = [line for line in lines if line.points]
    if not lines:
        return element("p", f"{title}: no numbers yet", class_="none")
    values = [y for line in lines for _, y in line.points]
    low, high = min(values), max(values) if ends[1] is None else ends[1]
    is_log = log and low > 0 and high > LOG_RATIO * low
    last = max(1.0, ends[0] or max(line.points[-1][0] for line in lines))
    y_ticks = _decades(low, high) if is_log else ticks(min(low, 0.0), high)
    axes = _Axes(size, last, (min(low, y_ticks[0]), max(high, y_ticks[-1])), is_log)

    width, height = size
    style = {
        "font_size": "13",
        "fill": "#5c6773",
        "style": f"width: 100%; max-width: {width}px; background: #fff",
    }
    svg = element("svg", viewBox=f"0 0 {width} {height}", role="img", aria_label=title, **style)
    ends_x = {"x1": str(LEFT), "x2": str(width - RIGHT)}
    for tick in y_ticks:
        y = f"{axes.y(tick):.1f}"
        svg.append(element("line", stroke="#d9dde3", y1=y, y2=y, **ends_x))
        text = f"{tick:.6g}{unit}"
        svg.append(element("text", text, x=str(LEFT - 8), y=y, dy="4", text_anchor="end"))
    for tick in ticks(0, last):
        if tick == int(tick) and tick <= last:
            place = {"x": f"{axes.x(tick):.1f}", "y": str(height - BOTTOM + 18)}
            svg.append(element("text", f"{tick:g}", text_anchor="middle", **place))
    place = {"x": str(width - RIGHT), "y": str(height - 6)}
    svg.append(element("text", x_label, text_anchor="end", **place))
    for line in sorted(lines, key=lambda line: line.style != "faint"):
        svg.extend(_draw(line, axes, f"{line.name or title}, {x_label}"))
    keys = [
        element("span", element("i", style=f"color: {colour}; {ENTRY}{STYLES[style][1]}"), name)
        for name, _, colour, style in lines
        if name
    ]
    return element(
        "figure", element("figcaption", element("b", title), *keys), svg, style="margin: 0"
    )


class _Axes:
    """Converts values to positions in the picture."""

    def __init__(self, size, x_end, y_bounds, is_log):
        self.size, self.x_end, self.is_log = size, x_end, is_log
        self.low, self.high = map(self._scaled, y_bounds)
        if self.low == self.high:
            self.high += 1

    def _scaled(self, value):
        return math.log10(value) if self.is_log else value

    def x(self, value):
        return LEFT + value / self.x_end * (self.size[0] - LEFT - RIGHT)

    def y(self, value):
        fraction = (self._scaled(value) - self.low) / (self.high - self.low)
        return self.size[1] - BOTTOM - fraction * (self.size[1] - TOP - BOTTOM)


def visible(x: np.ndarray, y: np.ndarray) -> list[Point]:
    """Return the points with finite y, reduced to at most MAX_POINTS that keep the extremes.

    A long line is divided into parts of equal length. Each part keeps its lowest and its highest
    point.
    """
    points = np.stack([x, y], axis=1)[np.isfinite(y)]
    if len(points) > MAX_POINTS:
        size = -(-len(points) // (MAX_POINTS // 2))
        parts = [(start, points[start : start + size, 1]) for start in range(0, len(points), size)]
        rows = {start + int(i) for start, part in parts for i in (part.argmin(), part.argmax())}
        points = points[sorted(rows)]
    return [(x, y) for x, y in points.tolist()]


def _draw(line, axes, name):
    places = [(f"{axes.x(x):.1f}", f"{axes.y(y):.1f}") for x, y in line.points]
    points, style = " ".join(map(",".join, places)), STYLES[line.style][0]
    elements = [element("polyline", points=points, fill="none", stroke=line.colour, **style)]
    if line.style == "points" or (line.style != "faint" and len(places) <= MAX_MARKS):
        for (x, y), (iteration, value) in zip(places, line.points, strict=True):
            tip = element("title", f"{name} {iteration:g}: {value:.6g}")
            elements.append(element("circle", tip, r="2.6", fill=line.colour, cx=x, cy=y))
    return elements


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers that span the interval from `low` to `high`."""
    span = high - low
    if not span > 0:
        return [low, low + 1] if low >= 0 else [low, 0.0]
    step = 10 ** math.floor(math.log10(span / count))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= count)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _decades(low, high):
    """Return powers of ten for a logarithmic axis; add 2 and 5 times each power on a short axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    step = max(1, (last - first) // 6)
    numbers = [factor * 10.0**n for n in range(first, last + 1, step) for factor in factors]
    inside = [number for number in numbers if low <= number <= high]
    below = max((n for n in numbers if n <= low), default=numbers[0])
    return [below, *(number for number in inside if number > below)]
