"""Read the results of the runs of a scaling study."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.errors import UserError
from mpidl.files import reason
from mpidl.ranks.thread_budget import SHARED_CORES
from mpidl.report import curves, run_files
from mpidl.training.files import checkpoint

if TYPE_CHECKING:
    from mpidl.performance.study import Run

COMPLETE, FAILED, STOPPED, WAITING = "done", "failed", "stopped", "waiting"
PHASES = ("compute", "wait", "sum", "input", "other")
SUMMARY = ("accuracy", "loss", "threads", "device", "weights_sha256", "train_seconds")
TAIL_BYTES = 4096
OTHER_LOAD = re.compile(r"mpidl\.scaling: other programs used ([\d.]+) % of the cores' time")
SMOOTHING = 0.9  # weight of the previous average in the accuracy by iteration
MOST_POINTS = 500  # of the accuracy by iteration


def row_of(ranks: int, runs: Sequence[Run], errors: Mapping[str, str]) -> dict[str, Any]:
    """Return the medians of the results of the finished runs on one number of ranks.

    Speeds are in images per second; `lowest` and `highest` are those of the runs. weights_sha256 is
    None if the runs differ. other_load is the highest share of the cores' time that other programs
    used. compute, wait, sum, input and other are fractions of the time, or None. curve has pairs
    [seconds, accuracy], iteration_curve pairs [iteration, smoothed accuracy of the mini-batches],
    and records, for each run, pairs [seconds, highest accuracy so far].
    """
    finished = [read_run(run) for run in runs if run.is_done()]
    messages = [errors[run.name] for run in runs if run.name in errors]
    has_started = any(checkpoint.exists(run.folder) for run in runs)
    state = COMPLETE if finished else FAILED if messages else STOPPED if has_started else WAITING
    row: dict[str, Any] = {"ranks": ranks, "state": state, "runs": len(finished)}
    rates = [result["images_per_second"] for result in finished]
    hashes = {result["weights_sha256"] for result in finished}
    row["images_per_second"] = _median(rates)
    row["lowest"], row["highest"] = (min(rates), max(rates)) if rates else (None, None)
    for name in ("train_seconds", "accuracy", "loss", *PHASES):
        row[name] = _median([result[name] for result in finished])
    first = finished[0] if finished else {}
    for name in ("threads", "device", "curve", "curve_kind", "iteration_curve"):
        row[name] = first.get(name)
    row["records"] = [result["records"] for result in finished]
    row["other_load"] = max((result["other_load"] for result in finished), default=None)
    row["weights_sha256"] = hashes.pop() if len(hashes) == 1 else None
    row["is_oversubscribed"] = any(result["is_oversubscribed"] for result in finished)
    row["error"] = messages[0] if messages else None
    return row


def _median(values):
    """Return the median of the values that are not None, or None if there are no such values."""
    numbers = [value for value in values if value is not None]
    return float(np.median(numbers)) if numbers else None


def read_run(run: Run) -> dict[str, Any]:
    """Return the results of a finished run, with the same names as in `row_of`."""
    summary, records = run_files.read_summary(run.folder), run_files.read_records(run.folder)
    kind, curve = curve_of(records)
    lines = log_lines(run.log)
    loads = [match[1] for line in lines if (match := OTHER_LOAD.fullmatch(line))]
    return {
        **{name: summary.get(name) for name in SUMMARY},
        "images_per_second": speed_of(records, summary) or summary.get("images_per_second"),
        "is_oversubscribed": any(SHARED_CORES in line for line in lines),
        "other_load": max(map(float, loads), default=0.0) / 100,
        "curve": curve,
        "curve_kind": kind,
        "iteration_curve": _iteration_curve(records),
        "records": _highest(
            curve if kind == "validation" else _smoothed(records, "seconds").tolist()
        ),
        **phases_of(records),
    }


def speed_of(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> float | None:
    """Return the images per second of a run, not counting the time of validations.

    The result is the median over the epochs. If there are at least three epochs, the first epoch is
    left out, because it fills caches. If no epoch is complete, the result is the mean over the
    iterations after the first one, or None if there are fewer than two iterations.
    """
    epochs = (record for record in records if record.get("kind") == "epoch")
    speeds = [r["images_per_second"] for r in epochs if r.get("images_per_second")]
    if speeds:
        return float(np.median(speeds[1:] if len(speeds) > 2 else speeds))
    intervals, previous = [], None
    for record in records:
        if record.get("kind") == "iteration":
            if previous is not None:
                intervals.append(record["seconds"] - previous)
            previous = record["seconds"]
        elif record.get("kind") == "validation":
            previous = None  # the next interval between iterations would include the validation
    if not intervals:
        return None
    all_images = summary["images_per_second"] * summary["train_seconds"]
    return float(all_images / summary["iterations"] / np.mean(intervals))


def curve_of(records: Sequence[Mapping[str, Any]]) -> tuple[str, list[list[float]]]:
    """Return ("validation" or "training", [[seconds, accuracy], ...]) from the records of a run."""
    validations = _points(records, "validation", "seconds")
    if validations:
        return "validation", validations
    return "training", _points(records, "epoch", "seconds")


def _points(records, kind, position):
    """Return [[position, accuracy], ...] of the records of a kind that have both."""
    points = ([r.get(position), r.get("accuracy")] for r in records if r.get("kind") == kind)
    return [point for point in points if None not in point]


def _smoothed(records, position):
    """Return the array (iterations, 2) of positions and smoothed accuracies of a run."""
    points = np.array(_points(records, "iteration", position), float).reshape(-1, 2)
    if len(points):
        points[:, 1] = curves.smoothed(points[:, 1], SMOOTHING)
    return points


def _iteration_curve(records):
    columns = _smoothed(records, "iteration").T
    return np.stack([curves.binned(column, MOST_POINTS) for column in columns], axis=1).tolist()


def _highest(points):
    """Return the points whose accuracy is higher than the accuracy of all earlier points."""
    kept_points: list = []
    for seconds, accuracy in points:
        if not kept_points or accuracy > kept_points[-1][1]:
            kept_points.append([seconds, accuracy])
    return kept_points


def add_time_to_accuracy(rows: Sequence[dict[str, Any]], accuracy: float | None) -> None:
    """Add `seconds_to_accuracy` to the rows, the median over the runs.

    The value is None if `accuracy` is None, or if a run does not reach this accuracy.
    """
    for row in rows:
        times = [
            next((seconds for seconds, value in points if value >= accuracy), None)
            for points in (row.get("records") or [] if accuracy is not None else [])
        ]
        row["seconds_to_accuracy"] = None if None in times else _median(times)


def other_load_line(share: float) -> str:
    """Return the line of a run's log that says how much other programs used the cores."""
    return f"mpidl.scaling: other programs used {100 * share:.1f} % of the cores' time\n"


def phases_of(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return {phase: fraction of the run's time}, as means over the ranks.

    The fractions are None if there are no records of phases.
    """
    totals = dict.fromkeys(PHASES, 0.0)
    for record in records:
        if record.get("kind") == "ranks":
            for name in PHASES:
                totals[name] += float(np.mean(record.get(name) or 0.0))
    duration = sum(totals.values())
    return {name: totals[name] / duration if duration else None for name in PHASES}


def add_efficiency(rows: Sequence[dict[str, Any]]) -> None:
    """Add speedup and efficiency to the rows, relative to the first row with a speed.

    The efficiency of this row is 1 by definition, even if the row is not for one rank.
    """
    base = next((row for row in rows if row["images_per_second"]), None)
    for row in rows:
        row["speedup"] = row["efficiency"] = None
        if base is not None and row["images_per_second"]:
            ratio = row["images_per_second"] / base["images_per_second"]
            row["speedup"] = ratio * base["ranks"]
            row["efficiency"] = row["speedup"] / row["ranks"]


def last_error(log: str) -> str | None:
    """Return the last error message of mpidl in a log, or else the last line of the log.

    Return None if the log is empty.
    """
    lines = log_lines(log)
    messages = [line.removeprefix("mpidl: ") for line in lines if line.startswith("mpidl: ")]
    return next(reversed(messages or lines), None)


def log_lines(path: str) -> list[str]:
    """Return the non-empty lines of a log. Return an empty list if the file does not exist."""
    if not os.path.exists(path):
        return []
    with open(path, errors="replace") as file:
        return [line.strip() for line in file if line.strip()]


def last_line(path: str) -> str:
    """Return the last non-empty line of a log. Only the last TAIL_BYTES bytes are read."""
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object from a file. Raise UserError if the file is damaged."""
    try:
        with open(path) as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: expected a JSON file, found: {reason(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def check_predictions(
    rows: Sequence[Mapping[str, Any]], predictions: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Compare predicted speeds and efficiencies with measured ones, in a dict for each number of
    ranks that was both. `measured` and `predicted` are images per second, `difference` is their
    relative difference, and `error` is the stated relative error of the prediction.
    `efficiency_difference` is the relative difference of the efficiencies, or None if there is no
    run on one rank. `is_counted` is False for one rank and for oversubscribed runs.
    """
    by_ranks = {row["ranks"]: row for row in predictions}
    has_base = any(row["ranks"] == 1 and row["images_per_second"] for row in rows)
    checks = []
    for row in rows:
        prediction, measured = by_ranks.get(row["ranks"]), row["images_per_second"]
        if prediction is None or not measured or not math.isfinite(prediction["images_per_second"]):
            continue
        predicted, efficiency = prediction["images_per_second"], None
        if has_base:
            efficiency = prediction["efficiency"] / row["efficiency"] - 1
        checks.append(
            {
                "ranks": row["ranks"],
                "measured": measured,
                "predicted": predicted,
                "difference": predicted / measured - 1,
                "efficiency_difference": efficiency,
                "error": prediction["error"],
                "is_counted": row["ranks"] > 1 and not row["is_oversubscribed"],
            }
        )
    return checks
