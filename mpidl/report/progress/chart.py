"""Draw small line charts as SVG, without a plotting library."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

WIDTH, HEIGHT = 430, 230  # pixels of a chart
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 28, 34  # pixels around the axes
MAX_POINTS = 600  # points of a line, a multiple of 4; more would not be visible
LOG_RATIO = 20  # ratio of the largest to the smallest value from which the axis is logarithmic

Point: TypeAlias = tuple[float, float]


class Curve:
    """The points of a line that grows, at most MAX_POINTS, which keep its extremes.

    A long line is divided into parts of equal length. Each has its lowest and its highest point.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Point, Point]] = []  # the lowest and the highest of each part
        self._count, self._size = 0, 1  # points so far, and points per part

    def add(self, x: float, y: float) -> None:
        """Append a point."""
        part = (x, y), (x, y)
        if self._count % self._size:
            self._parts[-1] = _merged(self._parts[-1], part)
        else:
            if len(self._parts) == MAX_POINTS // 2:
                pairs = zip(self._parts[::2], self._parts[1::2], strict=True)
                self._parts, self._size = [_merged(*pair) for pair in pairs], 2 * self._size
            self._parts.append(part)
        self._count += 1

    def __iter__(self) -> Iterator[Point]:
        for part in self._parts:
            yield from sorted(set(part))


def _merged(part, following):
    """Return the lowest and the highest point of two parts."""
    points = *part, *following
    return min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])


class Line(NamedTuple):
    """A line of a chart: its label, its colour, and its points in ascending order of x."""

    label: str
    colour: str
    points: Sequence[Point]
    width: float = 1.8
    has_markers: bool = False


def chart(title: str, lines: Sequence[Line], x_end: float, y_end: float | None = None) -> str:
    """Return a chart as an SVG element.

    Parameters
    ----------
    title : str
        Title above the axes.
    lines : sequence of Line
        The lines. Points that are not finite are left out.
    x_end : float
        End of the x axis, which starts at 0.
    y_end : float, optional
        End of the y axis, which then starts at 0. By default the values determine the axis, which
        is logarithmic if they are positive and differ by more than a factor of 20.
    """
    lines = [line._replace(points=_finite(line.points)) for line in lines]
    axis = _Axis([y for line in lines for _, y in line.points], y_end)
    x_ticks = _ticks(0.0, max(x_end, 1.0), 8)

    def x_of(x):
        return LEFT + (WIDTH - LEFT - RIGHT) * x / max(x_end, 1.0)

    def y_of(y):
        return TOP + (HEIGHT - TOP - BOTTOM) * (1.0 - axis.position(y))

    parts = [_text(LEFT, 14, title, anchor="start", size=12, colour="#333")]
    for value in axis.ticks():
        y = y_of(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd" stroke-width=".6"/>')
        parts.append(_text(LEFT - 5, y + 3.5, f"{value:g}"))
    for value in x_ticks:
        parts.append(_text(x_of(value), HEIGHT - BOTTOM + 14, f"{value:g}", anchor="middle"))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 4, "iteration"))
    label_x = WIDTH - RIGHT
    for line in reversed([line for line in lines if line.points]):
        parts.append(_text(label_x, 14, line.label, colour=line.colour))
        label_x -= 5.5 * len(line.label) + 10
    for line in lines:
        points = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points]
        style = f'fill="none" stroke="{line.colour}" stroke-width="{line.width}"'
        parts.append(f'<polyline points="{" ".join(points)}" {style}/>' if points else "")
        if line.has_markers:
            centres = (point.split(",") for point in points)
            parts += [
                f'<circle cx="{x}" cy="{y}" r="2.5" fill="{line.colour}"/>' for x, y in centres
            ]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="background:#fff">'
    return head + "".join(parts) + "</svg>"


class _Axis:
    """The y axis: its ends, and whether it is logarithmic."""

    def __init__(self, values, end):
        low, high = min(values, default=0.0), max(values, default=1.0)
        self.is_log = end is None and low > 0 and high > LOG_RATIO * low
        if self.is_log:
            self.low, self.high = math.log10(low), math.log10(high)
        else:
            self.low, self.high = min(low, 0.0), end or high
        if self.high <= self.low:
            self.high = self.low + 1.0

    def position(self, value):
        """Return the position of a value on the axis: 0 at its start, 1 at its end."""
        value = math.log10(value) if self.is_log else value
        return (value - self.low) / (self.high - self.low)

    def ticks(self):
        if not self.is_log:
            return _ticks(self.low, self.high, 5)
        decades = range(math.ceil(self.low), math.floor(self.high) + 1)
        return [10.0**decade for decade in decades]


def _ticks(low, high, count):
    """Return about `count` round numbers from low to high."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _finite(points):
    return [point for point in points if math.isfinite(point[1])]


def _text(x, y, text, anchor="end", size=10, colour="#777"):
    style = f'font-family="sans-serif" font-size="{size}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{text}</text>'
