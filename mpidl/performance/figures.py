"""Draw the figures of a scaling study.

Each line has a different marker, dash pattern and colour, from the palette of Okabe and Ito. The
figures are therefore readable in grayscale and by colour-blind people.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
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
MOST_CURVES = len(STYLES)
OVERVIEW = "scaling"
SUFFIXES = ("png", "pdf")


def draw(out: str, content: Mapping[str, Any]) -> list[str]:
    """Draw the overview and each figure as PNG and PDF, from the content of scaling.json.

    Return the names of the files, or an empty list if matplotlib is not installed. Raises UserError
    if a file cannot be written.
    """
    panels = [(name, panel) for name, panel in PANELS.items() if panel.applies(content)]
    if not panels:
        return []
    try:
        columns = 3 if len(panels) == 3 else min(2, len(panels))
        lines = -(-len(panels) // columns)
        overview = plots.new_figure(5.4 * columns, 3.7 * lines)
    except ImportError:
        return []
    axes = overview.subplots(lines, columns, squeeze=False).ravel()
    for place, (_, panel) in zip(axes, panels, strict=False):
        panel.draw(place, content)
    for place in axes[len(panels) :]:
        place.set_visible(False)
    names = _save(out, OVERVIEW, overview)
    for name, panel in panels:
        figure = plots.new_figure(5.4, 3.7)
        panel.draw(figure.subplots(), content)
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


class AccuracyPanel:
    """Panel that shows accuracy over time, with one line per number of ranks."""

    def applies(self, content: Mapping[str, Any]) -> bool:
        """Return whether there is a run with accuracies."""
        return any(row.get("curve") for row in content["rows"])

    def draw(self, axes: Any, content: Mapping[str, Any]) -> None:
        """Draw the panel."""
        rows = _evenly([row for row in content["rows"] if row.get("curve")])
        longest = max(row["curve"][-1][0] for row in rows)
        unit, name = (60, "minutes") if longest >= 300 else (1, "seconds")
        for row, (colour, dashes, marker) in zip(rows, STYLES, strict=False):
            seconds, accuracy = np.array(row["curve"]).T
            label = _ranks(row)
            interval = max(1, len(seconds) // 10)
            style = {"marker": marker, "markersize": 4, "markevery": interval, "linewidth": 1.6}
            axes.plot(
                seconds / unit, 100 * accuracy, color=colour, linestyle=dashes, label=label, **style
            )
        axes.set_xlim(left=0)
        axes.set_xlabel(f"time ({name})")
        axes.set_ylabel(f"{rows[0].get('curve_kind', 'training')} accuracy (%)")
        _finish(axes, "Accuracy over time")


class IterationPanel:
    """Panel that shows accuracy by iteration, with one line per number of ranks.

    Runs with the same weights have the same curve, so later lines are thinner than earlier ones.
    """

    def applies(self, content: Mapping[str, Any]) -> bool:
        """Return whether there is a run with accuracies of mini-batches."""
        return any(row.get("iteration_curve") for row in content["rows"])

    def draw(self, axes: Any, content: Mapping[str, Any]) -> None:
        """Draw the panel."""
        rows = _evenly([row for row in content["rows"] if row.get("iteration_curve")])
        for i, (row, (colour, dashes, _)) in enumerate(zip(rows, STYLES, strict=False)):
            iterations, accuracy = np.array(row["iteration_curve"]).T
            style = {
                "linewidth": 1.4 + 0.9 * (len(rows) - 1 - i),
                "linestyle": dashes if i else "-",
            }
            axes.plot(iterations, 100 * accuracy, color=colour, label=_ranks(row), **style)
        axes.set_xlim(left=0)
        axes.set_xlabel("iteration")
        axes.set_ylabel("training accuracy, smoothed (%)")
        _finish(axes, "Accuracy by iteration")


class TimeToAccuracyPanel:
    """Panel that shows the time to the accuracy of --accuracy, by number of ranks."""

    def applies(self, content: Mapping[str, Any]) -> bool:
        """Return whether a run reaches the accuracy."""
        return bool(self._rows(content))

    def _rows(self, content):
        return [row for row in content["rows"] if row.get("seconds_to_accuracy")]

    def draw(self, axes: Any, content: Mapping[str, Any]) -> None:
        """Draw the panel."""
        rows = self._rows(content)
        unit, name = (60, "minutes") if rows[0]["seconds_to_accuracy"] >= 300 else (1, "seconds")
        ranks = [row["ranks"] for row in rows]
        times = [row["seconds_to_accuracy"] / unit for row in rows]
        ideal = [times[0] * ranks[0] / n for n in ranks]
        axes.plot(ranks, ideal, color=GRAY, linestyle=(0, (1, 1.5)), linewidth=1.3, label="ideal")
        axes.plot(
            ranks, times, color=BLUE, linewidth=1.8, marker="o", markersize=5, label="measured"
        )
        axes.set_yscale("log")
        axes.set_ylabel(f"time ({name})")
        _rank_axis(axes, ranks)
        _plain_numbers(axes, has_few_decades=max(times) < 100 * min(*times, *ideal))
        kind = rows[0].get("curve_kind", "training")
        _finish(axes, f"Time to {100 * content['accuracy']:.6g} % {kind} accuracy")


def _evenly(rows):
    """Return at most MOST_CURVES rows, evenly spaced."""
    if len(rows) <= MOST_CURVES:
        return rows
    places = np.linspace(0, len(rows) - 1, MOST_CURVES).round().astype(int)
    return [rows[place] for place in places]


def _ranks(row):
    return f"{row['ranks']} rank" + ("s" if row["ranks"] > 1 else "")


class SpeedPanel:
    """Panel that shows ideal, measured and predicted images per second by number of ranks."""

    def applies(self, content: Mapping[str, Any]) -> bool:
        """Return whether there are measured or predicted speeds."""
        return bool(_measured(content) or _predicted(content))

    def draw(self, axes: Any, content: Mapping[str, Any]) -> None:
        """Draw the panel."""
        rows, predicted = _measured(content), _predicted(content)
        base = rows[0] if rows else predicted[0]
        ranks = sorted({row["ranks"] for row in rows} | {row["ranks"] for row in predicted})
        unit = base["images_per_second"] / base["ranks"]
        ideal = [unit * n for n in ranks]
        axes.plot(ranks, ideal, color=GRAY, linestyle=(0, (1, 1.5)), linewidth=1.3, label="ideal")
        _draw_prediction(axes, predicted, "images_per_second", 1)
        _draw_measured(axes, rows, "images_per_second", 1)
        axes.set_yscale("log")
        axes.set_ylabel("images per second")
        _rank_axis(axes, ranks)
        _plain_numbers(axes, has_few_decades=ideal[-1] < 100 * ideal[0])
        _finish(axes, "Speed")


class EfficiencyPanel:
    """Panel that shows efficiency by number of ranks."""

    def applies(self, content: Mapping[str, Any]) -> bool:
        """Return whether speeds were measured or predicted on several numbers of ranks."""
        return max(len(_measured(content)), len(_predicted(content))) > 1

    def draw(self, axes: Any, content: Mapping[str, Any]) -> None:
        """Draw the panel."""
        rows, predicted = _measured(content), _predicted(content)
        axes.axhline(100, color=GRAY, linestyle=(0, (1, 1.5)), linewidth=1.3, label="ideal")
        _draw_prediction(axes, predicted, "efficiency", 100)
        _draw_measured(axes, rows, "efficiency", 100)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("efficiency (%)")
        _rank_axis(axes, sorted({row["ranks"] for row in [*rows, *predicted]}))
        _finish(axes, "Efficiency")


class TimePanel:
    """Panel that shows the parts of the training time, as one bar per number of ranks.

    The parts are measured or, without measurements, predicted.
    """

    def applies(self, content: Mapping[str, Any]) -> bool:
        """Return whether the parts of the training time are known."""
        return bool(self._bars(content)[0])

    def _bars(self, content):
        """Return ([(label, {part: fraction of the time})], whether the parts are measured)."""
        measured = [row for row in _measured(content) if row.get("compute") is not None]
        if measured:
            return [(str(row["ranks"]), row) for row in measured], True
        bars = []
        for row in _predicted(content):
            seconds = row["step_seconds"]
            fractions = {name: row[name] / seconds for name in PARTS if name in row}
            bars.append((str(row["ranks"]), fractions))
        return bars, False

    def draw(self, axes: Any, content: Mapping[str, Any]) -> None:
        """Draw the panel."""
        bars, is_measured = self._bars(content)
        places, bottom = np.arange(len(bars)), np.zeros(len(bars))
        for name, (colour, hatch, label) in PARTS.items():
            heights = np.array([100 * (parts.get(name) or 0.0) for _, parts in bars])
            if heights.any():
                style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
                axes.bar(places, heights, 0.72, bottom=bottom, label=label, **style)
                bottom += heights
        axes.set_xticks(places, [label for label, _ in bars])
        axes.set_xlabel("ranks")
        axes.set_ylabel("fraction of the time (%)")
        axes.set_ylim(0, 100)
        _finish(
            axes,
            "Where the time goes" + ("" if is_measured else " (predicted)"),
            is_legend_outside=True,
        )


PANELS: dict[str, Any] = {
    "accuracy": AccuracyPanel(),
    "accuracy-by-iteration": IterationPanel(),
    "time-to-accuracy": TimeToAccuracyPanel(),
    "speed": SpeedPanel(),
    "efficiency": EfficiencyPanel(),
    "time": TimePanel(),
}


def _measured(content):
    return [row for row in content["rows"] if row["state"] == COMPLETE and row["images_per_second"]]


def _predicted(content):
    return (content.get("prediction") or {"rows": []})["rows"]


def _draw_measured(axes, rows, key, factor):
    """Draw the measured points. Points of runs with more threads than cores are hollow."""
    if not rows:
        return
    ranks = [row["ranks"] for row in rows]
    values = [factor * row[key] for row in rows]
    if key == "images_per_second":
        low = [row[key] - row["lowest"] for row in rows]
        high = [row["highest"] - row[key] for row in rows]
        if any(low) or any(high):
            axes.errorbar(ranks, values, [low, high], fmt="none", ecolor=BLUE, capsize=3)
    axes.plot(ranks, values, color=BLUE, linewidth=1.8, marker="o", markersize=5, label="measured")
    shared = [i for i, row in enumerate(rows) if row["is_oversubscribed"]]
    if shared:
        axes.plot(
            [ranks[i] for i in shared],
            [values[i] for i in shared],
            **{"color": BLUE, "marker": "o", "markersize": 5, "markerfacecolor": "white"},
            **{"linestyle": "none", "label": "more threads than cores"},
        )


def _draw_prediction(axes, rows, key, factor):
    """Draw the line of predictions, with a band for the error."""
    if not rows:
        return
    ranks = [row["ranks"] for row in rows]
    values = np.array([factor * row[key] for row in rows])
    error_key = "efficiency_error" if key == "efficiency" else "error"
    errors = np.array([row[error_key] for row in rows])
    band = {"color": "#f0b48a", "alpha": 0.45, "linewidth": 0}
    axes.fill_between(ranks, values / (1 + errors), values * (1 + errors), **band)
    axes.plot(ranks, values, color=ORANGE, linestyle="--", linewidth=1.6, label="predicted")


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
    if axes.get_legend_handles_labels()[0]:
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if is_legend_outside else {}
        handles, labels = axes.get_legend_handles_labels()
        if is_legend_outside:  # same order as in the bars, from top to bottom
            handles, labels = handles[::-1], labels[::-1]
        axes.legend(handles, labels, frameon=False, fontsize=8, handlelength=2.6, **place)
