"""Write the numbers of a run as a CSV file, which pandas, Excel and MATLAB's readtable open."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from mpidl.errors import UserError
from mpidl.report.status import FINISHED
from mpidl.trackers.base import Tracker, folder_of_run
from mpidl.trackers.records import writing

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer

NAME, ITERATION = "metrics.csv", "iteration"
FLUSH_SECONDS = 2.0  # shortest time between two writes of an incomplete row


class CSVHook(Tracker):
    """Writes metrics.csv in the folder of the run, with a row per iteration.

    The columns are the names of the numbers, such as "train_loss".
    """

    copied = (NAME,)
    _path: str
    _file: TextIO
    _table: csv.DictWriter
    _row: dict[str, Any]  # the last row, which can still change
    _row_start: int | None  # its position, if it is in the file
    _flush_time: float

    @classmethod
    def written(cls, folder: str) -> list[str]:
        """Return the path of the file in the folder of a run."""
        return [os.path.join(folder, NAME)]

    def open(self, trainer: Trainer) -> None:
        """Create the file, or remove the rows that a resumed run will write again."""
        self._path = os.path.join(folder_of_run(trainer, "--track csv"), NAME)
        iteration = trainer.position.iteration
        with writing(self._path):
            is_new = not iteration or not os.path.exists(self._path)
            if is_new or not os.path.getsize(self._path):
                with open(self._path, "w") as file:
                    file.write(f"{ITERATION}\n")
            self._rewrite((), last=iteration)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers to the row of an iteration."""
        numbers = {name.replace("/", "_"): v for name, v in values.items() if math.isfinite(v)}
        with writing(self._path):
            if new := [name for name in numbers if name not in self._table.fieldnames]:
                self.flush()
                self._file.close()
                self._rewrite(new)
            if self._row and step > int(self._row[ITERATION]):
                self._write_row()
                self._row, self._row_start = {}, None
            self._row |= {ITERATION: step, **numbers}
            if time.monotonic() - self._flush_time > FLUSH_SECONDS:
                self.flush()

    def flush(self) -> None:
        """Write all rows. The last row can still change."""
        with writing(self._path):
            if self._row:
                self._row_start = self._write_row()
            self._file.flush()
            self._flush_time = time.monotonic()

    def close(self, state: str = FINISHED) -> None:
        """Write all rows, and close the file."""
        with writing(self._path):
            self.flush()
            self._file.close()

    def _write_row(self):
        """Write the last row, or write it once more, and return its position in the file."""
        if self._row_start is not None:
            self._file.seek(self._row_start)
            self._file.truncate()
        start = self._file.tell()
        self._table.writerow(self._row)
        return start

    def _rewrite(self, new_columns: Iterable[str], last: float = math.inf) -> None:
        """Add columns, remove the rows after iteration `last`, and open the file for more rows."""
        part = f"{self._path}.part"
        self._file = open(part, "w", newline="", encoding="utf-8")
        self._row, self._row_start = {}, None
        try:
            with open(self._path, newline="", encoding="utf-8-sig") as file:  # or saved by Excel
                self._copy(csv.DictReader(file), new_columns, last)
            self.flush()
            os.replace(part, self._path)
        except (ValueError, csv.Error) as error:
            raise UserError(f"{self._path}: expected a table of --track csv: {error}") from None
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)

    def _copy(self, rows: csv.DictReader, new_columns: Iterable[str], last: float) -> None:
        columns = [*(rows.fieldnames or ()), *new_columns]
        if ITERATION not in columns:
            raise ValueError(f"found no column {ITERATION}")
        self._table = csv.DictWriter(self._file, columns, lineterminator="\n")
        self._table.writeheader()
        for row in rows:
            if None in row.values() or int(row[ITERATION]) > last:  # or incomplete
                break
            if self._row:
                self._write_row()
            self._row = row
