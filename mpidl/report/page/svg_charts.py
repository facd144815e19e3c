"""Draw curves as SVG, which a page holds as text: axes, lines, points and a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

import numpy as np

from mpidl.report.page.elements import element

WIDTH, HEIGHT = 720, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 40  # margins in pixels
MAX_POINTS = 600  # of a line; longer lines keep the extremes of each part
MAX_MARKS = 60  # of a line; more points are a line without marks
# Distinguishable with any colour vision, and on paper.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a5c00", "#56b4e9", "#e69f00", "#555555")


class Line(NamedTuple):
    """A line of a chart.

    Attributes
    ----------
    name : str
        Name in the legend; "" for a line without an entry.
    x, y : ndarray of float, shape (n,)
        The points. Points that are not finite are left out.
    colour : str
        Colour of the line.
    style : {"line", "dashed", "faint"}
        Solid with marks, dashed with marks, or thin and light.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: str
    style: str = "line"


def chart(title: str, lines: Sequence[Line], *, log: bool = False, unit: str = "") -> Element:
    """Draw lines against the iteration.

    Parameters
    ----------
    title : str
        Label of the vertical axis.
    lines : sequence of Line
        The lines; those without points are left out.
    log : bool
        Whether the vertical axis is logarithmic if the values differ by more than a factor of 20.
    unit : str
        Text behind the numbers of the vertical axis.

    Returns
    -------
    Element
        The SVG with its legend.
    """
    lines = [line for line in map(_finite, lines) if len(line.x)]
    if not lines:
        return element("p", f"{title}: no numbers yet", class_="none")
    values = np.concatenate([line.y for line in lines])
    low, high = float(values.min()), float(values.max())
    is_log = log and low > 0 and high > 20 * low
    last = max(float(line.x.max()) for line in lines)
    x_ticks = [tick for tick in ticks(0, last) if tick == int(tick)]
    y_ticks = _decades(low, high) if is_log else ticks(min(low, 0.0), high)
    bounds = (min(low, y_ticks[0]), max(high, y_ticks[-1]))
    axes = _Axes((0.0, max(last, 1.0)), bounds, is_log)

    svg = element("svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
    for tick in y_ticks:
        y = f"{axes.y(tick):.1f}"
        svg.append(element("line", class_="grid", x1=str(LEFT), x2=str(WIDTH - RIGHT), y1=y, y2=y))
        text = f"{tick:.6g}{unit}"
        svg.append(element("text", text, x=str(LEFT - 8), y=y, dy="4", text_anchor="end"))
    for tick in x_ticks:
        place = {"x": f"{axes.x(tick):.1f}", "y": str(HEIGHT - BOTTOM + 18)}
        svg.append(element("text", f"{tick:g}", text_anchor="middle", **place))
    place = {"x": str(WIDTH - RIGHT), "y": str(HEIGHT - 6)}
    svg.append(element("text", "iteration", text_anchor="end", class_="label", **place))
    for line in sorted(lines, key=lambda line: line.style != "faint"):
        svg.extend(_draw(line, axes, line.name or title))
    legend_lines = [line for line in lines if line.name]
    keys = [
        element("span", element("i", class_=line.style, style=f"color: {line.colour}"), line.name)
        for line in legend_lines
    ]
    caption = element("figcaption", element("b", title), *keys)
    return element("figure", caption, svg)


class _Axes:
    """Places of values in the picture."""

    def __init__(self, x_bounds, y_bounds, is_log):
        self.x_bounds, self.is_log = x_bounds, is_log
        self.y_bounds = tuple(map(self._scaled, y_bounds))
        if self.y_bounds[0] == self.y_bounds[1]:
            self.y_bounds = self.y_bounds[0], self.y_bounds[1] + 1

    def _scaled(self, values):
        return np.log10(values) if self.is_log else values

    def x(self, values):
        low, high = self.x_bounds
        return LEFT + (values - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, values):
        low, high = self.y_bounds
        height = HEIGHT - TOP - BOTTOM
        return HEIGHT - BOTTOM - (self._scaled(values) - low) / (high - low) * height


def _finite(line):
    y = np.asarray(line.y, np.float64)
    is_finite = np.isfinite(y)
    return line._replace(x=np.asarray(line.x, np.float64)[is_finite], y=y[is_finite])


def _draw(line, axes, name):
    x, y = _thinned(line.x, line.y)
    x, y = axes.x(x), axes.y(y)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    elements = [element("polyline", class_=line.style, points=points, stroke=line.colour)]
    if line.style != "faint" and len(x) <= MAX_MARKS:
        for a, b, iteration, value in zip(x, y, line.x, line.y, strict=True):
            tip = element("title", f"{name}, iteration {iteration:g}: {value:.6g}")
            place = {"cx": f"{a:.1f}", "cy": f"{b:.1f}"}
            elements.append(element("circle", tip, r="2.6", fill=line.colour, **place))
    return elements


def _thinned(x, y):
    """Return at most MAX_POINTS points, the smallest and the largest of each part of the line."""
    if len(x) <= MAX_POINTS:
        return x, y
    indices = set()
    for part in np.array_split(np.arange(len(x)), MAX_POINTS // 2):
        indices |= {int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    order = sorted(indices)
    return x[order], y[order]


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
    """Return powers of ten for a logarithmic axis; on a short axis also 2 and 5 times them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    step = max(1, (last - first) // 6)
    numbers = [factor * 10.0**n for n in range(first, last + 1, step) for factor in factors]
    inside = [number for number in numbers if low <= number <= high]
    below = max((n for n in numbers if n <= low), default=numbers[0])
    return [below, *(number for number in inside if number > below)]
