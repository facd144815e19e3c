"""The curves of a run, which progress.png, the report page and a notebook draw alike."""

from __future__ import annotations

import numpy as np

from mpidl.report.history import History, Series
from mpidl.report.svg_charts import Line, Point, visible

TRAINING, VALIDATION, FINAL = "#2c6fbb", "#c8501e", "#3c8d40"
# {kind of record: (name, colour, style of its line)}
LINES = {
    "iteration": ("mini-batches", TRAINING, "faint"),
    "epoch": ("training, mean over the epoch", TRAINING, "line"),
    "validation": ("validation", VALIDATION, "dashed"),
    "final_validation": ("validation of the returned network", FINAL, "points"),
}


def curves_of(history: History, field: str, factor: int = 1) -> dict[str, Line]:
    """Return {kind: line} of the finite values of a field. A kind without values has no line."""
    curves = {}
    for kind, (name, colour, style) in LINES.items():
        series = getattr(history, kind)
        x = _middles(history) if kind == "epoch" else series.iteration
        if points := visible(x, factor * series.as_dict()[field]):
            curves[kind] = Line(name, points, colour, style)
    return curves


def points_of(series: Series, field: str) -> list[Point]:
    """Return the points (iteration, value) of a field or a metric."""
    return visible(series.iteration, series.as_dict()[field])


def _middles(history: History) -> np.ndarray:
    """Return the middle of the iterations of each epoch, where its mean is drawn."""
    epoch, iteration = history.epoch, history.iteration
    starts = dict(zip(epoch.epoch + 1, epoch.iteration, strict=True))
    numbers, first = np.unique(iteration.epoch, return_index=True)
    starts |= dict(zip(numbers, iteration.iteration[first] - 1, strict=True))
    ends = zip(epoch.epoch, epoch.iteration, strict=True)
    return np.array([(starts.get(number, 0) + end) / 2 for number, end in ends])
