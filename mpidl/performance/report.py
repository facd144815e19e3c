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
        target["predicted_images_per_second"] = row["images_per_second"]
        target["prediction_error"] = row["error"]
        target["predicted_efficiency"] = row["efficiency"]
        target["predicted_epoch_seconds"] = row["epoch_seconds"]
    return [rows[ranks] for ranks in sorted(rows)]


def table_lines(content: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of all measurements and predictions."""
    rows, has_prediction = merged(content), bool(content.get("prediction"))
    measured = [row for row in rows if row["state"] == COMPLETE]
    has_accuracy = any(row.get("accuracy") is not None for row in measured)
    has_phases = any(row.get("compute") is not None for row in measured)
    head = ["ranks"]
    if measured or not has_prediction:
        head += ["images/s", "speed-up", "efficiency", "time"]
    accuracy = content.get("accuracy")
    head += [f"to {percent(accuracy)}"] if accuracy is not None else []
    head += ["accuracy"] if has_accuracy else []
    phases = [name for name in PHASES if name != "other"] if has_phases else []
    head += phases
    head += ["predicted", "±", "efficiency", "s/epoch"] if has_prediction else []
    lines = [head]
    for row in rows:
        marks = ("*" if row.get("is_oversubscribed") else "") + ("!" if is_disturbed(row) else "")
        cells = [f"{row['ranks']}{marks}"]
        if measured or not has_prediction:
            rate = row.get("images_per_second")
            text = row["state"] if row["state"] != "predicted" else ""
            cells.append(f"{rate:,.0f}" if rate else text)
            cells.append(_number(row.get("speedup"), ".2f"))
            cells += [_number(row.get("efficiency"), ".0%")]
            seconds = row.get("train_seconds")
            cells.append("" if seconds is None else clock(seconds))
        if accuracy is not None:
            seconds = row.get("seconds_to_accuracy")
            cells.append(_duration(seconds) if seconds is not None else _not_reached(row))
        cells += [_number(row.get("accuracy"), ".4f")] if has_accuracy else []
        cells += [_number(row.get(name), ".0%") for name in phases]
        if has_prediction:
            cells.append(_number(row.get("predicted_images_per_second"), ",.0f"))
            cells.append(_number(row.get("prediction_error"), ".0%"))
            cells.append(_number(row.get("predicted_efficiency"), ".0%"))
            seconds = row.get("predicted_epoch_seconds")
            cells.append(_number(seconds, ",.0f" if (seconds or 0) >= 100 else ".3g"))
        lines.append(cells)
    return aligned(lines, left=0)


def percent(fraction: float) -> str:
    """Format a fraction in per cent with as many digits as it has: 0.95 gives "95 %"."""
    return f"{100 * fraction:.6g} %"


def is_disturbed(row: Mapping[str, Any]) -> bool:
    """Return whether other programs used the cores so much that the speed is too low."""
    return (row.get("other_load") or 0.0) > BUSY_SHARE


def _not_reached(row):
    """Return "never", or "" if it is not known, as in the files of an older version."""
    return "never" if row["state"] == COMPLETE and row.get("records") else ""


def _number(value, form):
    return "" if value is None else format(value, form)


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
        lines.append(stop_line(prediction["stop"]))
        lines += option_lines(prediction["stop"])
        lines += check_lines(content.get("checks") or [])
    return lines


def fit_lines(fit: Mapping[str, Any], link: Sequence[float] | None) -> list[str]:
    """Return the lines that describe the fitted costs."""
    levels = sorted(fit["per_step_seconds"], key=int)
    lines = []
    for level in levels:
        step, block = fit["per_step_seconds"][level], fit["per_block_seconds"][level]
        lines.append(
            f"Step: {_duration(step)} + {_duration(block)} per block of 16 images and thread, "
            f"with {level} rank(s) per node"
        )
    for kind, alpha in fit["alpha_seconds"].items():
        beta = fit["beta_seconds_per_byte"][kind]
        rate = f"{1e-9 / beta:.3g} GB/s" if beta else "no limit seen"
        lines.append(f"Network {kind} a node: alpha {_duration(alpha)}, beta {rate}")
    if link is not None:
        lines.append(
            f"Network between nodes, assumed: latency {_duration(link[0])}, "
            f"{1e-9 / link[1]:.3g} GB/s"
        )
    elif "between" not in fit["alpha_seconds"]:
        lines.append(
            "note: the probe ran on one node, so the prediction for several nodes uses the "
            "network inside the node; --link sets another network"
        )
    lines.append(
        f"Exchange: {_duration(fit['per_exchange_seconds'])} + messages, "
        f"{fit['hidden']:.0%} of the gradient exchange overlaps with the backward pass"
    )
    lines.append(f"Ranks that train together: {fit['coupling']:.2f} x the time of these parts")
    lines.append(
        f"Residuals: {fit['fit_error']:.1%} of the steps, {fit['fold_error']:.1%} of the exchanges"
    )
    return lines


def stop_line(stop: Mapping[str, Any]) -> str:
    """Return the line with the number of ranks at which scaling stops."""
    if stop["ranks"] is None:
        return f"Scaling does not stop up to {stop['limit']} ranks"
    return (
        f"Scaling stops at {stop['ranks']} rank(s): twice as many would lose most time to "
        f"{stop['reason']}"
    )


def option_lines(stop: Mapping[str, Any]) -> list[str]:
    """Return a line for each option that would raise the number of ranks where scaling stops."""
    lines = []
    for option, ranks in stop["options"].items():
        point = "beyond 256" if ranks is None else f"at {ranks}"
        text = f"  with {option} it would stop {point} ranks"
        changes = option.startswith("--batch")
        lines.append(text + (" (other weights)" if changes else ""))
    return lines


def check_lines(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that compare predictions with measurements, one per number of ranks.

    A last line reports the largest differences.
    """
    lines = []
    for check in checks:
        text = f"Check: {check['ranks']} rank(s), predicted / measured - 1 = "
        text += f"{check['difference']:+.1%}, stated error ±{check['error']:.1%}"
        if not check["is_counted"]:
            text += " (not counted: " + (
                "one rank)" if check["ranks"] == 1 else "more threads than cores)"
            )
        lines.append(text)
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
