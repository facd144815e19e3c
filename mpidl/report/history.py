"""The history of a run as NumPy arrays: loss, accuracy, learning rate and speed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mpidl.report import metrics

VISIBLE = 0.01  # difference between accuracies, or between losses as a fraction, worth a note
MOST_RECENT = 64  # number of records to collect before they are copied to the arrays


@dataclass(frozen=True, eq=False, repr=False)
class Series:
    """Records of one kind, in order, with one array per field."""

    epoch: np.ndarray  # (n,): position of each record in the run, counted from 1
    iteration: np.ndarray
    # (n,): means over the mini-batch, the epoch or the validation set. The accuracy is NaN if
    # the loss has no classes.
    loss: np.ndarray
    accuracy: np.ndarray
    learning_rate: np.ndarray  # (n,): learning rate of the iteration
    images_per_second: np.ndarray  # (n,): training speed; NaN for validations
    seconds: np.ndarray  # (n,): time since the start of the run, in seconds
    # {name: ndarray of float64, shape (n,)} of the metrics of validations that the option
    # `metrics` requests, such as "f1"; NaN if a metric is missing or undefined.
    metrics: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.iteration)

    def as_dict(self) -> dict[str, np.ndarray]:
        """Return {field: array}, for example for ``pandas.DataFrame(series.as_dict())``."""
        metrics = {name: array for name, array in self.metrics.items() if name not in FIELDS}
        return {name: getattr(self, name) for name in FIELDS} | metrics

    def __repr__(self) -> str:
        last = f", last iteration {self.iteration[-1]}" if len(self) else ""
        return f"Series({len(self)} records{last})"


FIELDS = tuple(f.name for f in fields(Series) if f.name != "metrics")
POSITION = ("epoch", "iteration")  # fields with integer values
VALUES = tuple(name for name in FIELDS if name not in POSITION)
MOST_RESERVED = 1 << 18  # number of records, which take 14 MiB


@dataclass(frozen=True, eq=False, repr=False)
class History:
    """The history of a run.

    ``history.validation.loss`` is an array with the loss of each validation, and
    ``history.validation.iteration`` has the corresponding iterations. All arrays are copies.

    Attributes
    ----------
    iteration, epoch, validation : Series
        The records of all iterations, of all complete epochs and of all validations.
    final_validation : Series
        One record with the scores of the returned network, at the iteration of its weights. Empty
        before the end of a run and without validation images.

    Notes
    -----
    Losses, accuracies and learning rates are the same on all ranks. Times are from the clock of
    this rank.
    """

    iteration: Series
    epoch: Series
    validation: Series
    final_validation: Series

    @classmethod
    def from_records(cls, records: Iterable[Mapping[str, Any]]) -> History:
        """Return the history that the records of a metrics file describe.

        Parameters
        ----------
        records : iterable of mapping
            Records as `mpidl.report.metrics.read` returns them. Records of other kinds are
            omitted. Values that are missing or not numbers become NaN.

        Returns
        -------
        History
            The history.
        """
        return HistoryRecorder(records).history()

    def disagreement(self) -> str | None:
        """Describe how the final validation differs visibly from the last one of these weights.

        Returns
        -------
        str or None
            A text, or None if the accuracies differ by at most `VISIBLE`. Without an accuracy, the
            relative difference of the losses counts.
        """
        final, during = self.final_validation, self.validation
        rows = np.flatnonzero(np.isin(during.iteration, final.iteration))
        if not len(rows):
            return None
        name = "accuracy" if np.isfinite(final.accuracy[-1]) else "loss"
        before, after = getattr(during, name)[rows[-1]], getattr(final, name)[-1]
        limit = VISIBLE * (1.0 if name == "accuracy" else abs(before))
        if abs(after - before) <= limit or (np.isnan(before) and np.isnan(after)):
            return None
        return (
            f"the returned network has the validation {name} {after:.4f}; the validation during "
            f"training at iteration {final.iteration[-1]}, with the moving statistics of batch "
            f"normalization, found {before:.4f}"
        )

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={getattr(self, name)!r}" for name in KINDS)
        return f"History({counts})"


KINDS = tuple(f.name for f in fields(History))


class HistoryRecorder:
    """Collects the records of a run in memory, 56 bytes per record."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns = {kind: _Columns() for kind in KINDS}
        for record in records:
            self.add(record)

    def reserve(self, iterations: float) -> None:
        """Allocate the memory for the records of this many iterations now.

        The memory use of a long run then stays constant. The method allocates at most
        `MOST_RESERVED` records, because a run may end early.
        """
        self._columns["iteration"].reserve(int(min(iterations, MOST_RESERVED)))

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record with the keys of metrics.jsonl; ignore records of other kinds."""
        kind, epoch, iteration = (record.get(name) for name in ("kind", *POSITION))
        if kind not in KINDS or not (_is_position(epoch) and _is_position(iteration)):
            return
        columns = self._columns[kind]
        columns.append((epoch, iteration), [record.get(name) for name in VALUES])
        if isinstance(record.get("metrics"), Mapping):
            columns.add_metrics(record["metrics"])

    def cut(self, cut: metrics.Cut) -> None:
        """Remove the records that the run will repeat."""
        for kind, columns in self._columns.items():
            columns.cut(cut.last(kind))

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records in the format and order of metrics.jsonl."""
        rows: list[dict[str, Any]] = [
            {"kind": kind} | dict(zip((*POSITION, *VALUES), row, strict=True)) | columns.extra(i)
            for kind, columns in self._columns.items()
            for i, row in enumerate(columns.rows())
        ]
        for row in sorted(rows, key=lambda row: row["iteration"]):
            record = {k: metrics.number(v) if isinstance(v, float) else v for k, v in row.items()}
            if record["accuracy"] is None:
                del record["accuracy"]
            yield record

    def history(self) -> History:
        """Return the history so far. Later records do not change the result."""
        return History(**{kind: columns.series() for kind, columns in self._columns.items()})


class _Columns:
    """The records of one kind: two arrays, of integers and of floats, with a column per record."""

    def __init__(self) -> None:
        self.count = 0
        # Recent records that are not yet in the arrays. It is faster to copy several at a time.
        self._recent: list[tuple[tuple[int, int], list[Any]]] = []
        self.positions = np.zeros((len(POSITION), 16), np.int64)
        self.values = np.zeros((len(VALUES), 16))
        self.metrics: dict[int, dict[str, float]] = {}  # {record: its metrics}

    def reserve(self, count: int) -> None:
        """Allocate memory for `count` records, and write to it so that the system provides it."""
        self._store()
        if count > self.positions.shape[1]:
            self.positions, self.values = (
                np.pad(array[:, : self.count], ((0, 0), (0, count - self.count)), constant_values=1)
                for array in (self.positions, self.values)
            )

    def append(self, position: tuple[int, int], values: list[Any]) -> None:
        if self.count == self.positions.shape[1]:
            self.reserve(self.count + self.count // 2)
        self._recent.append((position, values))
        self.count += 1
        if len(self._recent) == MOST_RECENT:
            self._store()

    def _store(self):
        if self._recent:
            columns = slice(self.count - len(self._recent), self.count)
            positions, values = zip(*self._recent, strict=True)
            self.positions[:, columns] = np.transpose(positions)
            self.values[:, columns] = np.transpose([[*map(_number, row)] for row in values])
            self._recent.clear()

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the last record."""
        values = {str(name): _number(value) for name, value in metrics.items()}
        self.metrics[self.count - 1] = values

    def extra(self, row: int) -> dict[str, dict[str, float | None]]:
        """Return the field "metrics" of a record in the form that metrics.jsonl has, or {}."""
        if row not in self.metrics:
            return {}
        return {"metrics": {k: metrics.number(v) for k, v in self.metrics[row].items()}}

    def cut(self, iteration: int) -> None:
        self._store()
        iterations = self.positions[POSITION.index("iteration"), : self.count]
        self.count = int(np.searchsorted(iterations, iteration, "right"))
        self.metrics = {row: v for row, v in self.metrics.items() if row < self.count}

    def rows(self) -> list[tuple[int | float, ...]]:
        self._store()
        arrays = self.positions[:, : self.count], self.values[:, : self.count]
        positions, values = (array.T.tolist() for array in arrays)
        return [(*p, *v) for p, v in zip(positions, values, strict=True)]

    def series(self) -> Series:
        self._store()
        columns = [*self.positions[:, : self.count], *self.values[:, : self.count]]
        names = (*POSITION, *VALUES)
        arrays = {name: column.copy() for name, column in zip(names, columns, strict=True)}
        return Series(**arrays, metrics=self._metric_arrays())

    def _metric_arrays(self):
        arrays: dict[str, np.ndarray] = {}
        for row, values in self.metrics.items():
            for name, value in values.items():
                arrays.setdefault(name, np.full(self.count, np.nan))[row] = value
        return arrays


def _is_position(value):
    return isinstance(value, int) and 0 <= value < 2**63


def _number(value):
    if type(value) is float:
        return value
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer with more than 300 digits
        return math.nan
