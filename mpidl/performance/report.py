"""Write the results of a scaling study to scaling.json and scaling.csv, and format a table."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mpidl.files import write_whole
from mpidl.performance.results import COMPLETE, PHASES
from mpidl.ranks.thread_budget import BUSY_SHARE
from mpidl.report.progress.rows import clock
from mpidl.text import aligned

JSON, CSV = "scaling.json", "scaling.csv"
COLUMNS = f"""
ranks state runs threads device is_oversubscribed other_load
images_per_second lowest highest speedup efficiency train_seconds
seconds_to_accuracy accuracy loss {" ".join(PHASES)}
predicted_images_per_second prediction_error predicted_efficiency predicted_epoch_seconds
weights_sha256 error
""".split()
# {name in a merged row: name in a row of the prediction}
PREDICTED = {
    "predicted_images_per_second": "images_per_second",
    "prediction_error": "error",
    "predicted_efficiency": "efficiency",
    "predicted_epoch_seconds": "epoch_seconds",
}


def write(out: str, content: Mapping[str, Any]) -> None:
    """Write scaling.json and scaling.csv.

    "rows" is a list of results of `results.row_of`. "accuracy" is the accuracy to reach, or None.
    "prediction" is the result of `prediction.predict`, or None. Raises UserError if a file cannot
    be written.
    """
    text = json.dumps(content, indent=1, default=float, allow_nan=False) + "\n"
    write_whole(os.path.join(out, JSON), text.encode())
    table = io.StringIO()
    writer = csv.DictWriter(table, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(merged(content))
    write_whole(os.path.join(out, CSV), table.getvalue().encode())


def merged(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each number of ranks, with the measurement and the prediction."""
    rows = {row["ranks"]: dict(row) for row in content["rows"]}
    for row in (content.get("prediction") or {"rows": []})["rows"]:
        target = rows.setdefault(row["ranks"], {"ranks": row["ranks"], "state": "predicted"})
        target |= {name: row[key] for name, key in PREDICTED.items()}
    return [rows[ranks] for ranks in sorted(rows)]


def table_lines(content: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of all measurements and predictions."""
    rows = merged(content)
    columns = list(_columns(content, [row for row in rows if row["state"] == COMPLETE]))
    lines = [[title for title, _ in columns]]
    return aligned(lines + [[cell(row) for _, cell in columns] for row in rows], left=0)


def _columns(content, measured):
    """Yield (title, function that formats the cell of a row) for each column of the table."""
    has_prediction, accuracy = bool(content.get("prediction")), content.get("accuracy")
    yield "ranks", _name
    if measured or not has_prediction:
        yield "images/s", _speed
        yield "speed-up", _cell("speedup", ".2f")
        yield "efficiency", _cell("efficiency", ".0%")
        yield "time", _cell("train_seconds", clock)
    if accuracy is not None:
        yield f"to {percent(accuracy)}", _time_to_accuracy
    if any(row.get("accuracy") is not None for row in measured):
        yield "accuracy", _cell("accuracy", ".4f")
    if any(row.get("compute") is not None for row in measured):
        yield from ((name, _cell(name, ".0%")) for name in PHASES if name != "other")
    if has_prediction:
        yield "predicted", _cell("predicted_images_per_second", ",.0f")
        yield "±", _cell("prediction_error", ".0%")
        yield "efficiency", _cell("predicted_efficiency", ".0%")
        yield "s/epoch", _cell("predicted_epoch_seconds", _seconds)


def _cell(key, form):
    """Return a function that formats a value of a row by a format or a function; "" if unknown."""

    def cell(row):
        value = row.get(key)
        if value is None:
            return ""
        return form(value) if callable(form) else format(value, form)

    return cell


def _seconds(seconds):
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def _name(row):
    """Return the number of ranks, with marks for runs whose speed is too low."""
    is_shared = row.get("is_oversubscribed")
    return f"{row['ranks']}{'*' if is_shared else ''}{'!' if is_disturbed(row) else ''}"


def _speed(row):
    """Return the images per second, or the state of a run without a speed."""
    rate = row.get("images_per_second")
    return f"{rate:,.0f}" if rate else row["state"].replace("predicted", "")


def _time_to_accuracy(row):
    """Return the time, "never", or "" if it is not known, as in the files of an older version."""
    if row.get("seconds_to_accuracy") is not None:
        return _duration(row["seconds_to_accuracy"])
    return "never" if row["state"] == COMPLETE and row.get("records") else ""


def percent(fraction: float) -> str:
    """Format a fraction in per cent with as many digits as it has: 0.95 gives "95 %"."""
    return f"{100 * fraction:.6g} %"


def is_disturbed(row: Mapping[str, Any]) -> bool:
    """Return whether other programs used the cores so much that the speed is too low."""
    return (row.get("other_load") or 0.0) > BUSY_SHARE


def notes(content: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table.

    The lines report oversubscribed runs, equal weights and failed runs. With a prediction, they
    also report fitted costs, the number of ranks at which scaling stops, and checks.
    """
    rows, lines = content["rows"], []
    finished = [row for row in rows if row["state"] == COMPLETE]
    if any(row["is_oversubscribed"] for row in rows):
        lines.append("* more threads than cores: the speed says nothing about scaling")
    disturbed = [row for row in finished if is_disturbed(row)]
    if disturbed:
        load = max(row["other_load"] for row in disturbed)
        lines.append(
            f"! warning: other programs used up to {load:.0%} of the cores' time in the runs on "
            f"{_list([row['ranks'] for row in disturbed])} rank(s), whose speeds are too low: end "
            "these programs, and repeat the study with --overwrite"
        )
    hashes = {row["weights_sha256"] for row in finished}
    if len(finished) > 1 and len(hashes) == 1 and None not in hashes:
        lines.append(f"The same weights on {_list([row['ranks'] for row in finished])} ranks")
    lines += [f"Failed: {row['ranks']} ranks: {row['error']}" for row in rows if row.get("error")]
    prediction = content.get("prediction")
    if prediction:
        lines += fit_lines(prediction["fit"], prediction.get("link"))
        lines += stop_lines(prediction["stop"])
        lines += check_lines(content.get("checks") or [])
    return lines


def fit_lines(fit: Mapping[str, Any], link: Sequence[float] | None) -> list[str]:
    """Return the lines that describe the fitted costs."""
    lines = [
        f"Step: {_duration(fit['per_step_seconds'][level])} + "
        f"{_duration(fit['per_block_seconds'][level])} per block of 16 images and thread, "
        f"with {level} rank(s) per node"
        for level in sorted(fit["per_step_seconds"], key=int)
    ]
    for kind, alpha in fit["alpha_seconds"].items():
        beta = fit["beta_seconds_per_byte"][kind]
        rate = f"{1e-9 / beta:.3g} GB/s" if beta else "no limit seen"
        lines.append(f"Network {kind} a node: alpha {_duration(alpha)}, beta {rate}")
    if link is not None:
        rate = f"{1e-9 / link[1]:.3g} GB/s"
        lines.append(f"Network between nodes, assumed: latency {_duration(link[0])}, {rate}")
    elif "between" not in fit["alpha_seconds"]:
        lines.append(
            "note: the probe ran on one node, so the prediction for several nodes uses the "
            "network inside the node; --link sets another network"
        )
    return [
        *lines,
        f"Exchange: {_duration(fit['per_exchange_seconds'])} + messages, "
        f"{fit['hidden']:.0%} of the gradient exchange overlaps with the backward pass",
        f"Ranks that train together: {fit['coupling']:.2f} x the time of these parts",
        f"Residuals: {fit['fit_error']:.1%} of the steps, {fit['fold_error']:.1%} of the exchanges",
    ]


def stop_lines(stop: Mapping[str, Any]) -> list[str]:
    """Return the number of ranks at which scaling stops, and lines about options that raise it."""
    if stop["ranks"] is None:
        return [f"Scaling does not stop up to {stop['limit']} ranks"]
    lines = [
        f"Scaling stops at {stop['ranks']} rank(s): twice as many would lose most time to "
        f"{stop['reason']}"
    ]
    for option, ranks in stop["options"].items():
        point = "beyond 256" if ranks is None else f"at {ranks}"
        note = " (other weights)" if option.startswith("--batch") else ""
        lines.append(f"  with {option} it would stop {point} ranks{note}")
    return lines


def check_lines(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that compare predictions with measurements, one per number of ranks.

    A last line reports the largest differences.
    """
    lines = []
    for check in checks:
        text = f"Check: {check['ranks']} rank(s), predicted / measured - 1 = "
        text += f"{check['difference']:+.1%}, stated error ±{check['error']:.1%}"
        reason = "one rank" if check["ranks"] == 1 else "more threads than cores"
        lines.append(text + ("" if check["is_counted"] else f" (not counted: {reason})"))
    counted = [check for check in checks if check["is_counted"]]
    differences = [
        f"{max(map(abs, values)):.1%} of the {title}"
        for title, name in (("speed", "difference"), ("efficiency", "efficiency_difference"))
        if (values := [check[name] for check in counted if check[name] is not None])
    ]
    if differences:
        lines.append(
            f"Largest difference between prediction and measurement: {', '.join(differences)}"
        )
    return lines


def _duration(seconds):
    """Format seconds with three digits, in ms if there is at least 0.1 ms, else in µs."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 100 else clock(seconds)
    factor, unit = (1e3, "ms") if seconds >= 1e-4 else (1e6, "µs")
    return f"{factor * seconds:.3g} {unit}"


def _list(numbers):
    return ", ".join(map(str, numbers))
