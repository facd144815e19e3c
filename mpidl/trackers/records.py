"""What trackers share: histograms, names of numbers, and the facts that a resumed run needs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidl.errors import UserError
from mpidl.files import reason, write_whole
from mpidl.text import pip_install

GROUPS = {name: name for name in ("epoch", "validation", "final_validation")} | {
    "iteration": "train"
}
NUMBERS = ("loss", "accuracy", "learning_rate", "images_per_second")
BUCKETS = 64  # buckets of a histogram
IDENTITIES = "tracking.json"  # the file that a resumed run reads to continue the same records


class Histogram(NamedTuple):
    """The number of an array's values in each of 64 buckets of equal width."""

    counts: np.ndarray  # (64,): number of values per bucket
    edges: np.ndarray  # (65,): bounds of the buckets, from the smallest to the largest value
    total: float  # sum of the values, and of their squares
    squares: float


def histogram(values: np.ndarray) -> Histogram:
    """Count an array's values in 64 buckets. Values that are not finite are ignored."""
    flat = np.asarray(values, np.float32).ravel()
    low, high = (float(flat.min()), float(flat.max())) if flat.size else (0.0, 0.0)
    if not np.isfinite(high - low):
        flat = flat[np.isfinite(flat)]
        low, high = (float(flat.min()), float(flat.max())) if flat.size else (0.0, 0.0)
    width = (high - low) / BUCKETS
    with np.errstate(over="ignore"):
        # np.histogram takes ten times as long, which is noticeable for a small network
        places = (flat - np.float32(low)) * np.float32(1 / width if width > 1e-30 else 0)
        counts = np.bincount(np.minimum(places, BUCKETS - 1).astype(np.intp), minlength=BUCKETS)
        squares = float(np.dot(flat, flat))
    edges = np.linspace(low, high, BUCKETS + 1)
    return Histogram(counts, edges, float(flat.sum(dtype=np.float64)), squares)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record under their names, such as {"train/loss": 0.5}."""
    group = GROUPS.get(record["kind"])
    numbers = {name: record.get(name) for name in NUMBERS} | dict(record.get("metrics") or {})
    values = {} if group is None else {f"{group}/{name}": v for name, v in numbers.items()}
    if group in ("validation", "final_validation"):
        del values[f"{group}/learning_rate"]
    return {name: float(value) for name, value in values.items() if value is not None}


def need(package: str, tracker: str) -> None:
    """Raise UserError if the package of a tracker is not installed."""
    try:
        is_installed = importlib.util.find_spec(package) is not None
    except ValueError:  # a module without a specification, such as a test's replacement
        is_installed = True
    if not is_installed:
        raise UserError(
            f"--{tracker}: requires {package}, which is not installed ({pip_install(tracker)})"
        )


@contextlib.contextmanager
def writing(place: str, *errors: type[Exception]) -> Iterator[None]:
    """Convert OSError and the library's `errors` to a UserError that names `place`."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, *errors)):
            raise
        text = " ".join(reason(error).split())[:300]
        raise UserError(f"{place}: cannot be written: {text}") from error


def identity(folder: str | None, tracker: str) -> dict[str, Any]:
    """Return what `remember` stored for a tracker in the folder of a run, or {}."""
    facts = _identities(folder).get(tracker)
    return facts if isinstance(facts, dict) else {}


def remember(folder: str | None, tracker: str, facts: Mapping[str, Any]) -> None:
    """Store facts with which a resumed run finds its records, if the run has a folder."""
    if folder is not None:
        table = _identities(folder) | {tracker: dict(facts)}
        content = f"{json.dumps(table, indent=1)}\n".encode()
        write_whole(os.path.join(folder, IDENTITIES), content)


def _identities(folder):
    if folder is None:
        return {}
    try:
        with open(os.path.join(folder, IDENTITIES), "rb") as file:
            table = json.load(file)
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}
