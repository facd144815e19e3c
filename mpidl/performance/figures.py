"""Draw the figures of a scaling study.

Each line has a different marker, dash pattern and colour, from the palette of Okabe and Ito. The
figures are therefore readable in grayscale and by colour-blind people.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from mpidl.files import write_whole
from mpidl.performance.results import COMPLETE
from mpidl.report import plots

BLUE, ORANGE, GREEN, PURPLE, GRAY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#777777"
STYLES = (
    (BLUE, "-", "o"),
    (ORANGE, "--", "s"),
    (GREEN, "-.", "^"),
    (PURPLE, ":", "D"),
    ("#56b4e9", "-", "v"),
    ("#e69f00", "--", "P"),
    (GRAY, "-.", "X"),
    ("#000000", ":", "*"),
)
# {part of the time: (colour, hatch, label)}. Neighbouring parts differ in brightness.
PARTS = {
    "compute": ("#0b4f7d", "", "compute"),
    "sum": ("#d58a3a", "////", "sums"),
    "wait": ("#a9c6e6", "", "wait for ranks"),
    "input": ("#3f9c79", "....", "input"),
    "other": ("#eeeeee", "", "other"),
}
IDEAL = {"color": GRAY, "linestyle": (0, (1, 1.5)), "linewidth": 1.3, "label": "ideal"}
MEASURED = {"color": BLUE, "marker": "o", "markersize": 5}
OVERVIEW = "scaling"
SUFFIXES = ("png", "pdf")


def draw(out: str, content: Mapping[str, Any]) -> list[str]:
    """Draw the overview and each figure as PNG and PDF, from the content of scaling.json.

    Return the names of the files, or an empty list if matplotlib is not installed. Raises UserError
    if a file cannot be written.
    """
    draws = panels(content)
    if not draws:
        return []
    try:
        columns = 3 if len(draws) == 3 else min(2, len(draws))
        lines = -(-len(draws) // columns)
        overview = plots.new_figure(5.4 * columns, 3.7 * lines)
    except ImportError:
        return []
    places = overview.subplots(lines, columns, squeeze=False).ravel()
    for axes, draw_panel in zip(places, draws.values(), strict=False):
        draw_panel(axes)
    for axes in places[len(draws) :]:
        axes.set_visible(False)
    names = _save(out, OVERVIEW, overview)
    for name, draw_panel in draws.items():
        figure = plots.new_figure(5.4, 3.7)
        draw_panel(figure.subplots())
        names += _save(out, name, figure)
    return names


def _save(out, name, figure):
    names = []
    for suffix in SUFFIXES:
        file = io.BytesIO()
        metadata = {"CreationDate": None} if suffix == "pdf" else {"Software": None}
        figure.savefig(file, format=suffix, metadata=metadata)
        names.append(f"{name}.{suffix}")
        write_whole(os.path.join(out, names[-1]), file.getvalue())
    return names


def panels(content: Mapping[str, Any]) -> dict[str, Callable[[Any], None]]:
    """Return {name: function that draws the panel on axes} of the panels with something to show."""
    rows, predicted = content["rows"], (content.get("prediction") or {"rows": []})["rows"]
    measured = [row for row in rows if row["state"] == COMPLETE and row["images_per_second"]]
    curves, iterations, times = (
        [row for row in rows if row.get(name)]
        for name in ("curve", "iteration_curve", "seconds_to_accuracy")
    )
    bars = [row for row in measured if row.get("compute") is not None]
    draws = {
        "accuracy": curves and partial(_draw_accuracy, _evenly(curves)),
        "accuracy-by-iteration": iterations and partial(_draw_iterations, _evenly(iterations)),
        "time-to-accuracy": times and partial(_draw_times, times, content["accuracy"]),
        "speed": (measured or predicted) and partial(_draw_speed, measured, predicted),
        "efficiency": max(len(measured), len(predicted)) > 1
        and partial(_draw_efficiency, measured, predicted),
        "time": (bars or predicted) and partial(_draw_parts, bars, predicted),
    }
    return {name: draw_panel for name, draw_panel in draws.items() if draw_panel}


def _draw_accuracy(rows, axes):
    """Draw accuracy over time, with one line per number of ranks."""
    unit, name = _unit(max(row["curve"][-1][0] for row in rows))
    for row, (colour, dashes, marker) in zip(rows, STYLES, strict=False):
        seconds, accuracy = np.array(row["curve"]).T
        style = {"marker": marker, "markersize": 4, "markevery": max(1, len(seconds) // 10)}
        style |= {"color": colour, "linestyle": dashes, "linewidth": 1.6, "label": _ranks(row)}
        axes.plot(seconds / unit, 100 * accuracy, **style)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"time ({name})")
    axes.set_ylabel(f"{rows[0].get('curve_kind', 'training')} accuracy (%)")
    _finish(axes, "Accuracy over time")


def _draw_iterations(rows, axes):
    """Draw accuracy by iteration, with one line per number of ranks.

    Runs with the same weights have the same curve, so later lines are thinner than earlier ones.
    """
    for i, (row, (colour, dashes, _)) in enumerate(zip(rows, STYLES, strict=False)):
        iterations, accuracy = np.array(row["iteration_curve"]).T
        style = {"color": colour, "linestyle": dashes if i else "-", "label": _ranks(row)}
        style["linewidth"] = 1.4 + 0.9 * (len(rows) - 1 - i)
        axes.plot(iterations, 100 * accuracy, **style)
    axes.set_xlim(left=0)
    axes.set_xlabel("iteration")
    axes.set_ylabel("training accuracy, smoothed (%)")
    _finish(axes, "Accuracy by iteration")


def _draw_times(rows, goal, axes):
    """Draw the time to the accuracy `goal` by number of ranks."""
    unit, name = _unit(rows[0]["seconds_to_accuracy"])
    ranks = [row["ranks"] for row in rows]
    times = [row["seconds_to_accuracy"] / unit for row in rows]
    ideal = [times[0] * ranks[0] / n for n in ranks]
    axes.plot(ranks, ideal, **IDEAL)
    axes.plot(ranks, times, **MEASURED, linewidth=1.8, label="measured")
    axes.set_yscale("log")
    axes.set_ylabel(f"time ({name})")
    _rank_axis(axes, ranks)
    _plain_numbers(axes, has_few_decades=max(times) < 100 * min(*times, *ideal))
    _finish(axes, f"Time to {100 * goal:.6g} % {rows[0].get('curve_kind', 'training')} accuracy")


def _draw_speed(measured, predicted, axes):
    """Draw ideal, measured and predicted images per second by number of ranks."""
    base = (measured or predicted)[0]
    ranks = sorted({row["ranks"] for row in [*measured, *predicted]})
    ideal = [base["images_per_second"] / base["ranks"] * n for n in ranks]
    axes.plot(ranks, ideal, **IDEAL)
    _draw_lines(axes, measured, predicted, "images_per_second", "error", 1)
    axes.set_yscale("log")
    axes.set_ylabel("images per second")
    _rank_axis(axes, ranks)
    _plain_numbers(axes, has_few_decades=ideal[-1] < 100 * ideal[0])
    _finish(axes, "Speed")


def _draw_efficiency(measured, predicted, axes):
    """Draw the efficiency by number of ranks."""
    axes.axhline(100, **IDEAL)
    _draw_lines(axes, measured, predicted, "efficiency", "efficiency_error", 100)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("efficiency (%)")
    _rank_axis(axes, sorted({row["ranks"] for row in [*measured, *predicted]}))
    _finish(axes, "Efficiency")


def _draw_lines(axes, measured, predicted, key, error_key, factor):
    """Draw predictions with a band for the error, and measurements with the range of the runs.

    Points of runs with more threads than cores are hollow.
    """
    if predicted:
        ranks = [row["ranks"] for row in predicted]
        values = np.array([factor * row[key] for row in predicted])
        errors = np.array([row[error_key] for row in predicted])
        band = {"color": "#f0b48a", "alpha": 0.45, "linewidth": 0}
        axes.fill_between(ranks, values / (1 + errors), values * (1 + errors), **band)
        axes.plot(ranks, values, color=ORANGE, linestyle="--", linewidth=1.6, label="predicted")
    if not measured:
        return
    ranks, values = [row["ranks"] for row in measured], [factor * row[key] for row in measured]
    if key == "images_per_second":
        low = [row[key] - row["lowest"] for row in measured]
        high = [row["highest"] - row[key] for row in measured]
        if any(low) or any(high):
            axes.errorbar(ranks, values, [low, high], fmt="none", ecolor=BLUE, capsize=3)
    axes.plot(ranks, values, **MEASURED, linewidth=1.8, label="measured")
    shared = [row for row in measured if row["is_oversubscribed"]]
    if shared:
        hollow = {"markerfacecolor": "white", "linestyle": "none"}
        points = [row["ranks"] for row in shared], [factor * row[key] for row in shared]
        axes.plot(*points, **MEASURED, **hollow, label="more threads than cores")


def _draw_parts(measured, predicted, axes):
    """Draw the parts of the training time, as one bar per number of ranks.

    The parts are measured or, without measurements, predicted.
    """
    rows = measured or predicted
    wholes = [row.get("step_seconds", 1.0) for row in rows]  # measured parts are fractions
    places, bottom = np.arange(len(rows)), np.zeros(len(rows))
    for name, (colour, hatch, label) in PARTS.items():
        parts = [(row.get(name) or 0.0) / total for row, total in zip(rows, wholes, strict=True)]
        heights = 100 * np.array(parts)
        if heights.any():
            style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
            axes.bar(places, heights, 0.72, bottom=bottom, label=label, **style)
            bottom += heights
    axes.set_xticks(places, [str(row["ranks"]) for row in rows])
    axes.set_xlabel("ranks")
    axes.set_ylabel("fraction of the time (%)")
    axes.set_ylim(0, 100)
    title = "Where the time goes" + ("" if measured else " (predicted)")
    _finish(axes, title, is_legend_outside=True)


def _evenly(rows):
    """Return as many rows as there are styles, evenly spaced."""
    if len(rows) <= len(STYLES):
        return rows
    places = np.linspace(0, len(rows) - 1, len(STYLES)).round().astype(int)
    return [rows[place] for place in places]


def _ranks(row):
    return f"{row['ranks']} rank" + ("s" if row["ranks"] > 1 else "")


def _unit(seconds):
    """Return the unit of an axis that reaches to some seconds: (seconds in it, its name)."""
    return (60, "minutes") if seconds >= 300 else (1, "seconds")


def _rank_axis(axes, ranks):
    """Make the x axis logarithmic, with a tick at each number of ranks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.set_xlabel("ranks")


def _plain_numbers(axes, has_few_decades):
    """Label the logarithmic y axis with numbers such as 1,000 instead of powers of ten.

    If the axis has few decades, label 2,000 and 5,000 too.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    subs = (1.0, 2.0, 5.0) if has_few_decades else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _finish(axes, title, is_legend_outside=False):
    plots.lighten(axes)
    axes.set_title(title, loc="left")
    handles, labels = axes.get_legend_handles_labels()
    place = {}
    if is_legend_outside:  # same order as in the bars, from top to bottom
        handles, labels = handles[::-1], labels[::-1]
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    if labels:
        axes.legend(handles, labels, frameon=False, fontsize=8, handlelength=2.6, **place)
