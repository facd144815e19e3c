"""Write the results of a sweep: table.csv, table.png and a table on the terminal."""

import csv
import io
import math
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from mpidl.files import sync_folder, write_whole
from mpidl.report import plots, run_curves
from mpidl.report.progress.rows import clock
from mpidl.report.progress.terminal import terminal_width
from mpidl.text import aligned

CSV, PNG, FOLDS_CSV = "table.csv", "table.png", "folds.csv"
RESULTS = """
state accuracy loss validation_accuracy validation_loss epochs
iterations seconds weights_sha256 error
""".split()
# Trials are ranked by the first score that all ended trials have.
SCORES = ("validation_accuracy", "accuracy", "validation_loss", "loss")
MAX_PANELS = 6

# The columns of a trial: "trial" (its number), the options that vary, and RESULTS. A missing value
# is None.
Row = dict[str, Any]


def column_of(option: str) -> str:
    """Return the name of an option's column, which differs from all names in `RESULTS`."""
    return f"{option}_option" if option in RESULTS else option


def best_of(
    rows: Sequence[Row], folds: int | None = None, score: str | None = None
) -> tuple[Row, str] | None:
    """Return the best trial, or the best setting of `folds` trials, and the score that ranks them.

    Only ended trials, and settings whose folds have all ended, are compared. By default, the score
    is the first of `SCORES` that all of them have. Those without the score, such as trials with NaN
    weights, do not count. Among equal scores, the lowest loss is best, then the first row. Return
    None if no row has a score.
    """
    score = score or score_of(rows, folds)
    scored = [row for row in _scored_rows(rows, folds) if row[score] is not None]

    def order(row):
        loss = row[score.replace("accuracy", "loss")]
        rank = -row[score] if score.endswith("accuracy") else row[score]
        return rank, math.inf if loss is None else loss

    return (min(scored, key=order), score) if scored else None


def score_of(rows: Sequence[Row], folds: int | None = None) -> str:
    """Return the name of the score by which `best_of` ranks rows; "loss" if they share no score."""
    scored = _scored_rows(rows, folds)
    return next((n for n in SCORES if scored and all(row[n] is not None for row in scored)), "loss")


def _scored_rows(rows, folds):
    """Return the rows of trials or settings that have ended with a score."""
    return [
        row
        for row in rows
        if (row["state"] == "done" if folds is None else row["done"] == folds)
        and any(row[name] is not None for name in SCORES)
    ]


def write_csv(folder: str, rows: Sequence[Row], varied: Sequence[str], writer: int = 0) -> None:
    """Write DIR/table.csv with the options that vary.

    Several processes may write at the same time, so `writer` is the number of this one. Raises
    UserError if the file cannot be written.
    """
    part = os.path.join(folder, f".{CSV}.{writer}")
    write_whole(part, _csv(rows, ["trial", *varied, *RESULTS]))
    os.replace(part, os.path.join(folder, CSV))
    sync_folder(folder)


def fold_rows(rows: Sequence[Row], varied: Sequence[str], folds: int) -> list[Row]:
    """Summarize the trials of a cross-validation in one dict per setting of the other options.

    Each setting has `folds` consecutive trials. The columns are "trials" (such as "1-5"), those in
    `varied` except "fold", and "done", the number of folds that have ended. For each NAME in
    `SCORES`, NAME is the mean over the ended folds, and NAME_std the sample standard deviation.
    Both are None if no fold has ended or if an ended fold has no score. NAME_std is also None if
    only one fold has ended.
    """
    summaries = []
    for first in range(0, len(rows), folds):
        group = rows[first : first + folds]
        complete = [row for row in group if row["state"] == "done"]
        summary: Row = {"trials": f"{group[0]['trial']}-{group[-1]['trial']}"}
        summary |= {name: group[0].get(name) for name in varied if name != "fold"}
        summary["done"] = len(complete)
        for name in SCORES:
            values = [row[name] for row in complete if row[name] is not None]
            is_known = bool(values) and len(values) == len(complete)
            summary[name] = statistics.fmean(values) if is_known else None
            has_spread = is_known and len(values) > 1
            summary[f"{name}_std"] = statistics.stdev(values) if has_spread else None
        summaries.append(summary)
    return summaries


def print_folds(summaries: Sequence[Row]) -> None:
    """Print the result of `fold_rows` as a table with scores as "mean ± standard deviation"."""
    scores = [name for name in SCORES if any(row[name] is not None for row in summaries)]
    columns = [name for name in summaries[0] if name.removesuffix("_std") not in SCORES]
    texts = []
    for row in summaries:
        cells = {name: row[name] for name in columns}
        for name in scores:
            mean, spread = cell(name, row[name]), cell(name, row[f"{name}_std"])
            cells[name] = f"{mean} ± {spread}" if spread else mean
        texts.append(cells)
    print("\n".join(_lines(texts, [*columns, *scores])))


def write_folds(folder: str, summaries: Sequence[Row]) -> None:
    """Write the result of `fold_rows` to DIR/folds.csv; raise UserError if writing fails."""
    write_whole(os.path.join(folder, FOLDS_CSV), _csv(summaries, list(summaries[0])))


def _csv(rows, columns):
    text = io.StringIO()
    table = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


def print_table(rows: Sequence[Row], varied: Sequence[str], score: str | None = None) -> None:
    """Print the trials as a table.

    A narrow terminal shows fewer scores, but always the score that ranks the trials.
    """
    width = terminal_width(sys.stdout) or 100
    columns = ["trial", *varied, "state", *shown_scores(rows, score), "seconds"]
    optional = [name for name in shown_scores(rows, score) if name != (score or score_of(rows))]
    while max(map(len, lines := _lines(rows, columns))) > width and optional:
        columns.remove(optional.pop())
    print("\n".join(lines))


def describe_score(row: Row, score: str) -> str:
    """Return a text such as "validation accuracy 0.9812". A trial pruned by NaN has no score."""
    return f"{score.replace('_', ' ')} {cell(score, row[score]) or 'not finite'}"


def _lines(rows, columns):
    """Return the lines of a table of `rows` with the given columns."""
    titles = [name.replace("seconds", "time").split("_") for name in columns]
    height = max(map(len, titles))
    heads = zip(*([""] * (height - len(title)) + title for title in titles), strict=True)
    cells = [[cell(name, row.get(name), digits=4) for name in columns] for row in rows]
    texts = {
        i
        for i, name in enumerate(columns)
        if name == "state" or any(isinstance(row.get(name), str) for row in rows)
    }
    lines = aligned([*heads, *cells], left=texts)
    lines.insert(height, "─" * max(map(len, lines)))
    return lines


def shown_scores(rows: Sequence[Row], score: str | None = None) -> list[str]:
    """Return the names of the scores that fit on a terminal: at most three of `SCORES`.

    `score` is the score that ranks the trials of a search.
    """
    names = [name for name in SCORES if any(row[name] is not None for row in rows)]
    if "validation_accuracy" in names:
        hidden = "validation_accuracy" if score == "validation_loss" else "validation_loss"
        names = [name for name in names if name != hidden]
    return names


def cell(name: str, value: Any, digits: int = 6) -> str:
    """Return the text of a table's cell; floats of options have `digits` significant digits."""
    if value is None or isinstance(value, str):
        return value or ""
    if name == "seconds":
        return clock(value)
    if name in SCORES:
        return f"{value:.4f}" if name.endswith("accuracy") else f"{value:.4g}"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def draw(folder: str, rows: Sequence[Row], varied: Sequence[str], score: str | None = None) -> bool:
    """Draw DIR/table.png: the score of each trial against each option that varies.

    Return False if matplotlib is not installed or no trial has a score. Raise UserError if the file
    cannot be written.
    """
    if (choice := best_of(rows, score=score)) is None:
        return False
    best, score = choice
    scored = [row for row in rows if row[score] is not None]
    names = [name for name in varied if len({str(row.get(name)) for row in scored}) > 1]
    names = names[:MAX_PANELS] or ["trial"]
    try:
        figure = plots.new_figure(3.2 * max(len(names), 2), 3.4)
    except ImportError:
        return False
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    factor = 100 if score.endswith("accuracy") else 1
    for axes, name in zip(panels, names, strict=True):
        values: list[Any] = [row.get(name) for row in scored]
        is_number = all(isinstance(value, int | float) for value in values)
        values = values if is_number else [str(value) for value in values]
        axes.scatter(
            values, [row[score] * factor for row in scored], color=run_curves.TRAINING, s=22
        )
        axes.scatter(
            [values[scored.index(best)]],
            [best[score] * factor],
            color=run_curves.VALIDATION,
            s=46,
            label="best",
        )
        if is_number and min(values) > 0 and max(values) >= 20 * min(values):
            axes.set_xscale("log")
        axes.set_xlabel(name.replace("_", " "))
        plots.lighten(axes)
    panels[0].set_ylabel(score.replace("_", " ") + (" (%)" if factor == 100 else ""))
    panels[0].set_title(f"{len(scored)} trials", loc="left")
    panels[-1].legend(frameon=False)
    write_whole(os.path.join(folder, PNG), plots.png_of(figure))
    return True
