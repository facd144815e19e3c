"""The history of a run as NumPy arrays: loss, accuracy, learning rate and speed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mpidl.report import metrics
from mpidl.report.curves import Columns, number

VISIBLE = 0.01  # difference between accuracies, or between losses as a fraction, worth a note


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
    """Collects the records of a run in memory, 56 bytes per record.

    `columns` has the numbers of each kind of record, {kind: Columns}.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self.columns = {kind: Columns(FIELDS, integers=POSITION) for kind in KINDS}
        self._metrics: dict[str, dict[int, dict[str, float]]] = {kind: {} for kind in KINDS}
        for record in records:
            self.add(record)

    def reserve(self, iterations: float) -> None:
        """Allocate the memory for the records of this many iterations now.

        The memory use of a long run then stays constant. The method allocates at most
        `MOST_RESERVED` records, because a run may end early.
        """
        self.columns["iteration"].reserve(int(min(iterations, MOST_RESERVED)))

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record with the keys of metrics.jsonl; ignore records of other kinds."""
        kind = record.get("kind")
        if kind not in KINDS or not all(_is_position(record.get(name)) for name in POSITION):
            return
        if isinstance(values := record.get("metrics"), Mapping):
            row = len(self.columns[kind])
            self._metrics[kind][row] = {str(name): number(v) for name, v in values.items()}
        self.columns[kind].append(record)

    def cut(self, cut: metrics.Cut) -> None:
        """Remove the records that the run will repeat."""
        for kind, columns in self.columns.items():
            end = np.searchsorted(columns.column("iteration"), cut.last(kind), "right")
            columns.cut(int(end))
            self._metrics[kind] = {row: v for row, v in self._metrics[kind].items() if row < end}

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records in the format and order of metrics.jsonl."""
        records: list[dict[str, Any]] = []
        for kind, columns in self.columns.items():
            rows = zip(*(columns.column(name).tolist() for name in FIELDS), strict=True)
            for i, row in enumerate(rows):
                record = {"kind": kind, **dict(zip(FIELDS, row, strict=True))}
                values = self._metrics[kind].get(i)
                records.append(record if values is None else {**record, "metrics": values})
        for record in sorted(records, key=lambda record: record["iteration"]):
            record = metrics.finite(record)
            if record["accuracy"] is None:
                del record["accuracy"]
            yield record

    def history(self) -> History:
        """Return the history so far. Later records do not change the result."""
        return History(**{kind: self._series(kind) for kind in KINDS})

    def _series(self, kind):
        columns, arrays = self.columns[kind], {}
        for row, values in self._metrics[kind].items():
            for name, value in values.items():
                arrays.setdefault(name, np.full(len(columns), np.nan))[row] = value
        return Series(**{name: columns.column(name) for name in FIELDS}, metrics=arrays)


def _is_position(value):
    return isinstance(value, int) and 0 <= value < 2**63
