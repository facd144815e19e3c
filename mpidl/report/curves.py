"""Store growing columns of numbers, and reduce the columns to the points of a curve."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

POINTS = 1000  # maximum number of points of a curve


class Columns:
    """Columns of float64 numbers of equal length; a missing number is NaN."""

    def __init__(self, names: Sequence[str]) -> None:
        self._columns = {name: array("d") for name in names}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a row with the numbers of a record."""
        for name, column in self._columns.items():
            column.append(number(record.get(name)))

    def column(self, name: str) -> np.ndarray:
        """Return a copy of a column."""
        return np.array(self._columns[name])

    def last(self, name: str) -> float:
        """Return the last number of a column, or NaN if the column is empty."""
        return self._columns[name][-1] if len(self) else math.nan

    def recent_mean(self, name: str, rows: int = 20) -> float:
        """Return the mean of the finite numbers in the last rows of a column, or NaN."""
        values = [value for value in self._columns[name][-rows:] if math.isfinite(value)]
        return sum(values) / len(values) if values else math.nan

    def recent_rate(self, name: str, per: str, rows: int = 200) -> float:
        """Return the mean increase of a column per unit of the column `per`, over the last rows."""
        change, units = (
            column[-1] - column[-min(len(column), rows)] if len(column) else 0.0
            for column in (self._columns[name], self._columns[per])
        )
        return change / units if units > 0 else math.nan


def number(value: object) -> float:
    """Convert a value of a record to a float, or to NaN if the value is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def binned(values: np.ndarray, limit: int = POINTS) -> np.ndarray:
    """Average runs of consecutive numbers, ignoring NaNs, so that at most `limit` numbers remain.

    The length of the runs is a power of two, so that points stay in place while the array grows.
    """
    length = 1
    while len(values) > limit * length:
        length *= 2
    if length == 1:
        return values
    starts = np.arange(0, len(values), length)
    valid = np.isfinite(values)
    sums = np.add.reduceat(np.where(valid, values, 0), starts)
    counts = np.add.reduceat(valid.astype(float), starts)
    return np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the exponential moving average of an array; NaNs are ignored.

    The weight of the previous average is from 0 (no smoothing) to below 1. The first averages are
    corrected for the missing previous numbers.
    """
    averages, total, norm = [], 0.0, 0.0
    for value in values.tolist():
        if math.isfinite(value):
            total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        averages.append(total / norm if norm and math.isfinite(value) else math.nan)
    return np.array(averages)
