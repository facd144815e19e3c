"""Read the files in the folder of a run, which may be finished or in progress.

All other modules read these files by the functions here. `metrics`, `status` and `history` define
what is in them, and the live page reads them while they grow (`live.tail`).
"""

from __future__ import annotations

import csv
import glob
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidl.errors import UserError
from mpidl.files import open_for_reading, open_regular, read_toml, unreadable
from mpidl.report import metrics
from mpidl.report.history import History
from mpidl.report.metrics import FILE
from mpidl.report.status import FAILED, FINISHED, Status, parse
from mpidl.report.status import NAME as STATUS

OPTIONS, SUMMARY, CONFUSION = "options.toml", "summary.json", "confusion.csv"
CLASS_METRICS, BAD_IMAGES = "class-metrics.csv", "bad-images.csv"
TIMES = (
    "input",
    "compute",
    "wait",
    "sum",
    "other",
)  # columns of a "ranks" record, with the seconds of each rank
# Entries of summary.json to show in reports.
NUMBERS = """
accuracy loss validation_accuracy validation_loss
images_per_second train_seconds epochs iterations ranks threads
""".split()
TEXTS = ("device", "precision", "stopped", "weights_sha256")


@dataclass(frozen=True, eq=False)
class ConfusionTable:
    """The confusion matrix of the test set; `counts` (K, K) has a row per true class.

    `accuracy` is NaN if there are no labels, or if an image has NaN scores.
    """

    classes: list[str]
    counts: np.ndarray
    accuracy: float


@dataclass(frozen=True, eq=False)
class RunFiles:
    """The content of a run's folder."""

    folder: str
    history: History  # the records of metrics.jsonl
    # Options and inputs of the run, the source of each value, and versions of the software;
    # empty if the folder has no options.toml, which `dl.train` does not write.
    options: dict[str, Any]
    sources: dict[str, str]
    versions: dict[str, str]
    # The entries NUMBERS and TEXTS of summary.json; empty if the run has not finished.
    summary: dict[str, Any]
    confusion: ConfusionTable | None  # the confusion matrix of the test set
    # The metrics of the test set as a table with headings in the first row; [] without metrics.
    metrics: list[list[str]]
    # A dict per rank with its device, its memory in bytes and its seconds per phase; empty if
    # the run did not measure the phases.
    ranks: list[dict[str, Any]]
    status: Status | None  # the content of status.json; None if the file does not exist
    written: float  # time of the last change of metrics.jsonl, in seconds since 1970

    @property
    def state(self) -> str:
        """State of the run: "in training" if it has not ended and the last record is recent."""
        if self.status is not None and self.status.state == FAILED:
            return f"failed: {self.status.error}"
        if self.summary:
            stopped = self.summary.get("stopped")
            return f"finished early: {stopped}" if stopped else "finished"
        if self.status is not None and self.status.state == FINISHED:
            return f"stopped: {self.status.stopped}" if self.status.stopped else "finished"
        age = time.time() - self.written
        return "in training" if age < 60 else "not finished"


def read(folder: str) -> RunFiles:
    """Read the folder of a run; the path of its metrics.jsonl is also accepted.

    Raises UserError if the folder has no run, or if a file cannot be read or is damaged. An
    incomplete last line of metrics.jsonl is accepted.
    """
    records = read_records(folder)
    folder = folder if os.path.isdir(folder) else os.path.dirname(folder) or os.curdir
    history = History.from_records(records)
    summary = _typed_entries(read_summary(folder))
    confusion = _read_confusion(os.path.join(folder, CONFUSION))
    table = _read_rows(os.path.join(folder, CLASS_METRICS), "a table of metrics")
    if not is_current(summary, max(history.iteration.iteration, default=0)):
        summary, confusion, table = {}, None, []  # results from before the run was resumed
    tables = _read_options(os.path.join(folder, OPTIONS))
    return RunFiles(
        folder=folder,
        history=history,
        options={**tables.get("options", {}), **tables.get("run", {})},
        sources=tables.get("sources", {}),
        versions=tables.get("versions", {}),
        summary=summary,
        confusion=confusion,
        metrics=table,
        ranks=_sum_ranks([record for record in records if record.get("kind") == "ranks"]),
        status=_read_status(os.path.join(folder, STATUS)),
        written=os.path.getmtime(os.path.join(folder, FILE)),
    )


def history(run: str | os.PathLike[str]) -> History:
    """Read the history of a run from its folder.

    The run may still be training. An incomplete last line of metrics.jsonl is ignored.

    Parameters
    ----------
    run : path
        The folder of the run, or its file metrics.jsonl.

    Returns
    -------
    History

    Raises
    ------
    UserError
        If the folder does not exist or has no run, or if the file cannot be read.
    """
    return History.from_records(read_records(run))


def read_records(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the records of all kinds of a run. See `history` for parameters and errors."""
    path = os.fspath(run)
    if os.path.isdir(path):
        path = os.path.join(path, FILE)
        if not os.path.exists(path):
            raise UserError(f"{run}: expected the folder of a run, found no {FILE} in it")
    elif not os.path.exists(path):
        raise UserError(f"{path}: expected the folder of a run, found nothing there")
    elif os.path.basename(path) != FILE:
        raise UserError(f"{path}: expected the folder of a run or its {FILE}, found another file")
    try:
        return metrics.read(path)
    except OSError as error:
        raise unreadable(path, error) from error


def has_ended(folder: str) -> bool:
    """Return whether a run has ended with results."""
    return os.path.exists(os.path.join(folder, SUMMARY))


def read_summary(folder: str) -> dict[str, Any]:
    """Return the content of summary.json; {} if the run has not ended with results.

    Raises UserError if the file cannot be read or is damaged.
    """
    path = os.path.join(folder, SUMMARY)
    try:
        with open_for_reading(path) as file:
            summary = json.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected JSON, found {error}") from error
    if not isinstance(summary, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(summary).__name__}")
    return summary


def folders(paths: Sequence[str]) -> list[str]:
    """Return the folders of runs, replacing the folder of a sweep by the folders of its trials."""
    runs: list[str] = []
    for path in paths:
        trials = glob.glob(os.path.join(glob.escape(path), "trial-*", FILE))
        is_sweep = trials and not os.path.exists(os.path.join(path, FILE))
        runs += sorted(map(os.path.dirname, trials)) if is_sweep else [path]
    return runs


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest distinct ends of paths, such as "digits" or "a/digits"."""
    parts = [path.strip(os.sep).split(os.sep) for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = [os.sep.join(part[-count:]) or os.sep for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({i + 1})" for i, path in enumerate(paths)]


def is_current(summary: Mapping[str, Any], last_iteration: int) -> bool:
    """Return whether summary.json describes the run up to the last iteration in metrics.jsonl."""
    iterations = summary.get("iterations")
    return not isinstance(iterations, int) or iterations >= last_iteration


def _read_options(path):
    if not os.path.exists(path):
        return {}
    tables = read_toml(path, path)
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def _typed_entries(summary):
    """Return the entries of summary.json to show in reports, if they have the right types."""
    numbers = {name: summary.get(name) for name in NUMBERS if _is_number(summary.get(name))}
    texts = {name: summary[name] for name in TEXTS if isinstance(summary.get(name), str)}
    return {**numbers, **texts}


def _read_status(path):
    try:
        with open_for_reading(path) as file:
            return parse(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def _read_rows(path, contents):
    """Return the rows of a .csv file, or [] if the file does not exist."""
    try:
        with open(open_regular(path)[0], newline="", encoding="utf-8") as file:
            return list(csv.reader(file))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: expected {contents}, found {error}") from error


def _read_confusion(path):
    if not os.path.exists(path):
        return None
    rows = _read_rows(path, "a confusion matrix")
    classes = rows[0][1:-1] if rows else []
    try:
        if not classes:
            raise ValueError
        counts = [[int(cell) for cell in row[1:-1]] for row in rows[1:-1]]
        table = np.array(counts, np.int64).reshape(len(classes), len(classes))
        accuracy = float(rows[-1][-1] or "nan")
    except (ValueError, OverflowError, IndexError) as error:
        raise UserError(
            f"{path}: expected a row and a column of counts for each class, found other cells"
        ) from error
    return ConfusionTable(classes, table, accuracy)


def _sum_ranks(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add up the seconds of each rank over records with the same devices as the last record."""
    if not records or not isinstance(records[-1].get("device"), list):
        return []
    devices = records[-1]["device"]
    ranks: list[dict[str, Any]] = [
        {"device": str(device), "memory": None, **dict.fromkeys(TIMES, 0.0)} for device in devices
    ]
    for record in records:
        lists: list[Any] = [record.get(name) for name in TIMES]
        if record.get("device") != devices or not all(_is_row(row, len(ranks)) for row in lists):
            continue
        memory: Any = record.get("memory")
        for i, rank in enumerate(ranks):
            rank["memory"] = memory[i] if _is_row(memory, len(ranks)) else rank["memory"]
            for name, row in zip(TIMES, lists, strict=True):
                rank[name] += row[i]
    return ranks


def _is_row(row, length):
    is_list = isinstance(row, list) and len(row) == length
    return is_list and all(map(_is_number, row))


def _is_number(value):
    """Return whether a value from JSON is a finite number that fits into a float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max
