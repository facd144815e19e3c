"""The curves of a run, which progress.png, the report page and a notebook draw alike."""

from __future__ import annotations

import math

from mpidl.report.history import History, Series
from mpidl.report.svg_charts import Line, Point

TRAINING, VALIDATION, FINAL = "#2c6fbb", "#c8501e", "#3c8d40"
# {kind of record: (name, colour, style of its line)}
LINES = {
    "iteration": ("mini-batches", TRAINING, "faint"),
    "epoch": ("training, mean over the epoch", TRAINING, "line"),
    "validation": ("validation", VALIDATION, "dashed"),
    "final_validation": ("validation of the returned network", FINAL, "points"),
}


def curves_of(history: History, field: str, factor: int = 1) -> dict[str, Line]:
    """Return {kind: line} of the finite values of a field. A kind without values has no line.

    The mean of an epoch is drawn at the middle of its iterations.
    """
    curves = {kind: points_of(getattr(history, kind), field, factor) for kind in LINES}
    starts = dict(zip(history.epoch.epoch + 1, history.epoch.iteration, strict=True))
    curves["epoch"] = [
        ((float(starts.get(epoch, 0)) + x) / 2, y)
        for epoch, (x, y) in zip(history.epoch.epoch, curves["epoch"], strict=True)
    ]
    return {
        kind: Line(name, points, colour, style)
        for kind, (name, colour, style) in LINES.items()
        if (points := [point for point in curves[kind] if math.isfinite(point[1])])
    }


def points_of(series: Series, field: str, factor: int = 1) -> list[Point]:
    """Return the points (iteration, value) of a field or a metric."""
    values = series.as_dict()[field] * factor
    return list(zip(series.iteration.tolist(), values.tolist(), strict=True))
