"""Write an HTML page about one or more runs: curves, options and confusion matrices."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpidl.report import run_curves, svg_charts
from mpidl.report.elements import STYLE, Content, element, page, table
from mpidl.report.progress.rows import clock
from mpidl.report.run_files import TIMES, RunFiles, short_names

MAX_CLASSES = 30  # with more classes, a page lists the most frequent confusions only
MAX_PAIRS = 20
# {name: (whether larger is better, number of decimals)}.
RESULTS: dict[str, tuple[bool | None, int | None]] = {
    "accuracy": (True, 4),
    "loss": (False, 4),
    "validation_accuracy": (True, 4),
    "validation_loss": (False, 4),
    "images_per_second": (True, 0),
}
FACTS = ("epochs", "iterations", "ranks", "threads", "device", "precision")


def render(runs: Sequence[RunFiles]) -> bytes:
    """Return an HTML page about runs. The page needs no other file and no script."""
    names = short_names([run.folder for run in runs])
    is_single = len(runs) == 1
    texts = [element("p", text) for text in notes(runs, names)]
    title = f"Run {names[0]}" if is_single else f"{len(runs)} runs"
    return page(
        title,
        STYLE,
        element("h1", title),
        element("p", _subtitle(runs)),
        *_section("Results", _results(runs, names), *texts),
        *_section("Curves", _curves(runs, names)),
        *_section("Options", *_options(runs, names)),
        *_section("Metrics on the test set", *_of_each(_metrics, runs, names)),
        *_section("Confusion on the test set", *_of_each(_confusion, runs, names)),
        *_section("Ranks and devices", *_of_each(_devices, runs, names)),
        *_section("Versions", _versions(runs, names)),
    )


def result_rows(
    runs: Sequence[RunFiles], names: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Return the heading and the rows of a table with the results of each run."""
    columns = [
        name for name in (*RESULTS, *FACTS) if any(_result(run, name) is not None for run in runs)
    ]
    rows = []
    for run, name in zip(runs, names, strict=True):
        cells = [_text(_result(run, column), column) for column in columns]
        rows.append([name, run.state, *cells, _text(_seconds(run), "seconds")])
    head = ["run", "state", *(column.replace("_", " ") for column in columns), "training time"]
    return head, rows


def _section(title, *contents: Content):
    contents = tuple(content for content in contents if content is not None)
    return [element("h2", title), *contents] if contents else []


def _subtitle(runs):
    written = [time.strftime("%Y-%m-%d %H:%M", time.localtime(run.written)) for run in runs]
    folders = runs[0].folder if len(runs) == 1 else ", ".join(run.folder for run in runs)
    return f"{folders}. Last record: {max(written)}."


def notes(runs: Sequence[RunFiles], names: Sequence[str]) -> list[str]:
    """Return a text for each run whose final validation differs from the one in training."""
    texts = [run.history.disagreement() for run in runs]
    return [f"note: {name}: {text}" for name, text in zip(names, texts, strict=True) if text]


def _results(runs, names):
    head, rows = result_rows(runs, names)
    cells: list[list[Content]] = [list(row) for row in rows]
    for column, (larger_is_better, _) in RESULTS.items():
        values = [_result(run, column) for run in runs]
        numbers = [value for value in values if value is not None]
        if len(numbers) < 2 or len(set(numbers)) < 2:
            continue
        best = max(numbers) if larger_is_better else min(numbers)
        place = head.index(column.replace("_", " "))
        for row, value in zip(cells, values, strict=True):
            if value == best:
                row[place] = element("td", row[place], class_="best")
    hashes = [run.summary.get("weights_sha256", "") for run in runs]
    if any(hashes):
        head = [*head, "weights_sha256"]
        for row, text in zip(cells, hashes, strict=True):
            short = text if len(runs) == 1 else text[:12]
            row.append(element("td", short, class_="hash", title=text))
    if len(runs) == 1:
        pairs = zip(head, cells[0], strict=True)
        return table(["", ""], [pair for pair in pairs if pair[1] != ""][1:], "options")
    return table(head, cells)


def _result(run: RunFiles, name: str) -> Any:
    """Return a result from the summary, or from the history if the run has no summary."""
    if run.summary:
        return run.summary.get(name)
    history, epochs = run.history, run.history.epoch
    validation = history.final_validation if len(history.final_validation) else history.validation
    latest = {
        "validation_accuracy": _last(validation.accuracy),
        "validation_loss": _last(validation.loss),
        "images_per_second": _last(epochs.images_per_second),
        "epochs": len(epochs) or None,
        "iterations": _last(run.history.iteration.iteration),
        "ranks": len(run.ranks) or None,
    }
    return latest.get(name)


def _last(column):
    return column[-1].item() if len(column) and np.isfinite(column[-1]) else None


def _seconds(run):
    return run.summary.get("train_seconds") or _last(run.history.iteration.seconds)


def _text(value, name):
    if value is None:
        return ""
    if name == "seconds":
        return clock(value)
    decimals = RESULTS.get(name, (None, None))[1]
    is_number = isinstance(value, int | float) and decimals is not None
    return f"{value:.{decimals}f}" if is_number else str(value)


def _curves(runs, names):
    """Return the charts of all runs. Lines of a single run have the colours of progress.png."""
    is_single = len(runs) == 1
    colours = [svg_charts.COLOURS[i % len(svg_charts.COLOURS)] for i in range(len(runs))]
    places = list(zip(runs, names, colours, strict=True))
    charts = []
    for field, title, factor, unit in (("loss", "Loss", 1, ""), ("accuracy", "Accuracy", 100, "%")):
        lines: list[svg_charts.Line] = []
        for run, name, colour in places:
            curves = run_curves.curves_of(run.history, field, factor)
            if is_single:
                lines += curves.values()
                continue
            if len(run.history.epoch):
                curves.pop("iteration", None)
            for line in curves.values():
                short = f"{name} {line.name.split(',')[0]}"
                lines.append(line._replace(name=short, colour=colour))
        charts.append(svg_charts.chart(title, lines, log=field == "loss", unit=unit))
    metrics = dict.fromkeys(name for run in runs for name in run.history.validation.metrics)
    for title, kind, field in (
        ("Learning rate", "iteration", "learning_rate"),
        ("Images/s", "epoch", "images_per_second"),
        *((f"Validation: {metric}", "validation", metric) for metric in metrics),
    ):
        lines = [
            svg_charts.Line("" if is_single else name, run_curves.points_of(series, field), colour)
            for run, name, colour in places
            if field in (series := getattr(run.history, kind)).as_dict()
        ]
        charts.append(svg_charts.chart(title, lines))
    return element("div", *charts, class_="charts")


def _options(runs, names):
    """Return two tables: options that differ (between runs or from defaults), and the rest."""
    if not any(run.options for run in runs):
        return []
    everything = list(dict.fromkeys(name for run in runs for name in run.options))
    is_single = len(runs) == 1
    if is_single:
        first = [name for name in everything if runs[0].sources.get(name) != "default"]
    else:
        first = [
            name for name in everything if len({_option(run.options, name) for run in runs}) > 1
        ]
    rest = [name for name in everything if name not in first]
    head = ["option", *(["value", "from"] if is_single else names)]
    text = "No option differs from its default." if is_single else "All options are the same."
    top: Content = element("p", text)
    if first:
        top = table(head, [_option_row(runs, name) for name in first], "options")
        for row in top.iter("tr") if not is_single else ():
            if row[0].tag == "th" and row[0].text in first:
                row.set("class", "differs")
    folded = "Options at their default values" if is_single else "Options that are the same"
    folded_rows = [element("summary", f"{folded} ({len(rest)})")]
    folded_rows.append(table(head, [_option_row(runs, name) for name in rest], "options"))
    return [top, element("details", *folded_rows) if rest else None]


def _option_row(runs, name):
    cells = [name, *(_option(run.options, name) for run in runs)]
    return [*cells, runs[0].sources.get(name, "")] if len(runs) == 1 else cells


def _option(options: Mapping[str, Any], name: str) -> str:
    return "" if name not in options else str(options[name])


def _of_each(contents_of, runs, names):
    """Return the contents for each run, below the name of the run if there are several."""
    contents: list[Content] = []
    for run, name in zip(runs, names, strict=True):
        if parts := contents_of(run):
            contents += [element("h3", name) if len(runs) > 1 else None, *parts]
    return contents


def _metrics(run):
    if len(run.metrics) < 2:
        return []
    head, *rows = run.metrics
    return [table(head, rows if len(rows) <= MAX_CLASSES else rows[-1:])]


def _confusion(run: RunFiles) -> list[Content]:
    if run.confusion is None:
        return []
    confusion, counts, classes = run.confusion, run.confusion.counts, run.confusion.classes
    labels = int(counts.sum())
    text = f"Accuracy {confusion.accuracy:.4f} on {labels} labels."
    if len(classes) > MAX_CLASSES:
        errors = counts * (1 - np.eye(len(classes), dtype=np.int64))
        order = np.argsort(-errors, axis=None, kind="stable")[:MAX_PAIRS]
        cells = [np.unravel_index(i, errors.shape) for i in order]
        rows = [[classes[i], classes[j], str(errors[i, j])] for i, j in cells if errors[i, j]]
        text += f" The most frequent confusions of {len(classes)} classes:"
        return [element("p", text), table(["true class", "predicted class", "labels"], rows)]
    shades = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    rows = [
        [name, *(_shaded(n, shade) for n, shade in zip(row, shade_row, strict=True))]
        for name, row, shade_row in zip(classes, counts, shades, strict=True)
    ]
    text += " Rows are true classes, and columns are predicted classes."
    heads = [element("th", name, title=name) for name in classes]
    return [element("p", text), table(["", *heads], rows, "confusion")]


def _shaded(count, shade):
    style = f"background: rgba(0, 90, 160, {shade:.3f})"
    return element("td", str(count), style=style, class_="dark" if shade > 0.5 else "light")


def _devices(run):
    if run.ranks:
        return [_rank_table(run.ranks)]
    if not run.summary:
        return []
    facts = [run.summary.get(name) for name in ("ranks", "device", "threads")]
    row = ["" if fact is None else str(fact) for fact in facts]
    return [table(["ranks", "device", "threads per rank"], [row], "options")]


def _rank_table(ranks):
    """Return a table with the device, the memory and the time shares of each rank."""
    rows = []
    for i, rank in enumerate(ranks):
        duration = max(sum(rank[name] for name in TIMES), 1e-9)
        shares = [rank[name] / duration for name in TIMES]
        memory = "" if rank["memory"] is None else f"{rank['memory'] / 2**20:.0f} MiB"
        rows.append([str(i), rank["device"], memory, *(f"{share:.1%}" for share in shares)])
    return table(["rank", "device", "memory", *TIMES], rows)


def _versions(runs, names):
    packages = list(dict.fromkeys(name for run in runs for name in run.versions))
    rows = [[name, *(str(run.versions.get(name, "")) for run in runs)] for name in packages]
    head = ["", *(["version"] if len(runs) == 1 else names)]
    return table(head, rows, "options") if rows else None
