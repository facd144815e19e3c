"""Test SVG charts: their axes, lines, points and legend."""

import math

import numpy as np
import pytest

from mpidl.report import svg_charts


def drawn(lines, **options):
    """Draw lines. Return the figure, the texts in the picture, and the points of each line."""
    figure = svg_charts.chart("Loss", lines, **options)
    texts = [text.text for text in figure.iter("text")]
    points = [
        [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
        for line in figure.iter("polyline")
    ]
    return figure, texts, points


def test_a_chart():
    lines = [
        svg_charts.Line("mini-batch", [(i, 1 / i) for i in range(1, 401)], "#abc", "faint"),
        svg_charts.Line("epoch", [(5, 0.5), (6, math.nan), (9, 0.25)], "#123"),
        svg_charts.Line("validation", [], "#f00"),
    ]
    figure, texts, (long_line, short_line) = drawn(lines, log=True)
    assert len(long_line) == 400 and len(short_line) == len(list(figure.iter("circle"))) == 2
    assert {"iteration", "0.1", "0.01", "400"} <= set(texts)
    assert [key.find("i").tail for key in figure.iter("span")] == ["mini-batch", "epoch"]
    width, height = svg_charts.SIZE
    assert all(0 <= x <= width and 0 <= y <= height for x, y in long_line)
    assert (
        long_line == sorted(long_line) and long_line[0][1] < long_line[-1][1]
    )  # y grows downwards


def test_the_ends_of_axes():
    _, texts, ((first, last),) = drawn(
        [svg_charts.Line("a", [(0, 0.5), (50, 1.0)], "red")], ends=(100, 2.0), size=(430, 230)
    )
    assert "100" in texts and "2" in texts
    middle = (svg_charts.LEFT + 430 - svg_charts.RIGHT) / 2
    assert last == (middle, (svg_charts.TOP + 230 - svg_charts.BOTTOM) / 2)
    assert first[0] == svg_charts.LEFT and first[1] > last[1]


@pytest.mark.parametrize("values", [[0.0], [2.0], [-1.0, 3.0], [5.0, 5.0], [1e-9, 1e9]])
def test_a_chart_of_unusual_values(values):
    _, texts, points = drawn([svg_charts.Line("a", list(enumerate(values)), "#000")], log=True)
    assert texts and all(math.isfinite(place) for pair in points[0] for place in pair)
    assert drawn([svg_charts.Line("a", [(1, math.nan)], "red")])[0].text.endswith("no numbers yet")


def test_ticks_are_round_and_span_the_values():
    assert svg_charts.ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert svg_charts.ticks(0, 568) == [0, 200, 400, 600]
    assert svg_charts.ticks(3, 3) == [3, 4]


def test_long_lines_keep_their_extremes():
    points = [(i, 5.0 if i == 70_001 else 0.0) for i in range(100_000)]
    _, _, (line,) = drawn([svg_charts.Line("a", points, "red")])
    assert len(line) <= svg_charts.MAX_POINTS
    assert min(y for _, y in line) == svg_charts.TOP


@pytest.mark.parametrize(
    "count", [1, svg_charts.MAX_POINTS // 2, 2 * svg_charts.MAX_POINTS + 3, 100_001]
)
def test_a_curve_keeps_its_extremes(count):
    """A curve of any length keeps its extremes and a small number of evenly spread points."""
    spikes = {count // 3: -1.0, count // 2: 2.0}
    values = [spikes.get(i, (i % 7) / 7) for i in range(count)]
    points = svg_charts.visible(np.arange(count), np.array(values))
    assert points == sorted(points)
    assert set(spikes.items()) <= set(points) or count == 1
    if count <= svg_charts.MAX_POINTS // 2:
        assert [x for x, _ in points] == list(range(count))
    else:
        assert svg_charts.MAX_POINTS // 4 < len(points) <= svg_charts.MAX_POINTS
        gaps = [after - before for (before, _), (after, _) in zip(points, points[1:], strict=False)]
        assert max(gaps) <= 12 * count / svg_charts.MAX_POINTS
