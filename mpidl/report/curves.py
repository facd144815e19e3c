"""Store growing columns of numbers, and reduce the columns to the points of a curve."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

POINTS = 1000  # maximum number of points of a curve


class Columns:
    """Growing columns of equal length, of float64 numbers or of integers.

    A float64 number that is missing is NaN.
    """

    def __init__(self, names: Sequence[str], integers: Sequence[str] = ()) -> None:
        self._columns = {name: array("q" if name in integers else "d") for name in names}
        self._count = self._reserved = 0

    def __len__(self) -> int:
        return self._count

    def reserve(self, count: int) -> None:
        """Allocate memory for `count` rows, and write to it so that the system provides it."""
        for column in self._columns.values():
            column.frombytes(bytes(8 * max(0, count - self._reserved)))
        self._reserved = max(count, self._reserved)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a row with the numbers of a record."""
        if self._count == self._reserved:
            self.reserve(max(16, self._count * 3 // 2))
        for name, column in self._columns.items():
            value = record.get(name)
            column[self._count] = value if column.typecode == "q" else number(value)
        self._count += 1

    def cut(self, count: int) -> None:
        """Remove all rows after the first `count`."""
        self._count = count

    def column(self, name: str) -> np.ndarray:
        """Return a copy of a column."""
        column = self._columns[name]
        dtype = np.int64 if column.typecode == "q" else np.float64
        return np.array(memoryview(column)[: self._count], dtype)

    def last(self, name: str) -> float:
        """Return the last number of a column, or NaN if the column is empty."""
        return self._columns[name][self._count - 1] if self._count else math.nan

    def recent_mean(self, name: str, rows: int = 20) -> float:
        """Return the mean of the finite numbers in the last rows of a column, or NaN."""
        recent = self._columns[name][max(0, self._count - rows) : self._count]
        values = [value for value in recent if math.isfinite(value)]
        return sum(values) / len(values) if values else math.nan

    def recent_rate(self, name: str, per: str, rows: int = 200) -> float:
        """Return the mean increase of a column per unit of the column `per`, over the last rows."""
        first = self._count - min(self._count, rows)
        change, units = (
            self.last(name) - self._columns[name][first] if self._count else 0.0
            for name in (name, per)
        )
        return change / units if units > 0 else math.nan


def number(value: object) -> float:
    """Convert a value of a record to a float, or to NaN if the value is not a number."""
    if type(value) is float:  # the usual case
        return value
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
