"""Read tables of image files: CSV files with one row per image.

The column `path` has the path of the image file relative to the folder of the table. The labels or
targets are in one of the following columns:

- `label`: the name of the image's class.
- `labels`: names of several classes, joined by a separator.
- any other columns: numeric targets. If there are several columns and all of them hold only 0 and
  1, each column is a class, and an image may have several classes.

The optional column `split` names the part to which an image belongs: train, validation or test.
"""

from __future__ import annotations

import csv
import io
import math
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidl.data.formats.format import PART_NAMES
from mpidl.data.formats.image_files import MAX_BYTES
from mpidl.data.storage.paths import listed, open_binary, stamp_of
from mpidl.data.storage.settings import is_remote
from mpidl.errors import UserError
from mpidl.files import Stamp, reason, stamp, unreadable
from mpidl.text import did_you_mean, name_list, printable, sorted_classes

PATH, LABEL, LABELS, SPLIT = "path", "label", "labels", "split"
SEPARATORS = (";", "|")  # possible separators of the names in a cell of the column `labels`


class LabelSets(NamedTuple):
    """Sets of labels, one per image."""

    labels: np.ndarray  # concatenated labels of all images, int64
    ends: np.ndarray  # for each image, the end of its labels in `labels`, int64 (n,)
    classes: int

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return float32 (len(indices), classes): 1 for the labels of an image, 0 otherwise."""
        rows = np.zeros((len(indices), self.classes), np.float32)
        for row, i in zip(rows, indices.tolist(), strict=True):
            row[self.labels[self.ends[i - 1] if i else 0 : self.ends[i]]] = 1
        return rows


class Rows(NamedTuple):
    """The rows of a table that belong to one part."""

    files: list[str]  # paths of the image files, as written in the table
    stamps: list[Stamp]
    # Label of each image, int64 (n,). None if the table has no column `label`.
    labels: np.ndarray | None
    # Targets: float32 (n,) from one column, float32 (n, R) from several columns, or sets of
    # labels. None if there are no targets.
    targets: np.ndarray | LabelSets | None
    classes: list[str]  # class names of the labels, or of targets that are 0 or 1
    # Reason why labels or targets are missing. None if they exist, or if the table has no
    # column for them.
    problem: str | None


class Table:
    """The cells of a table, with their line numbers for messages.

    Raises UserError if the file cannot be read, is not a CSV file in UTF-8, has no rows or no
    column `path`, or if the number of cells in a row differs from the number of columns.
    """

    def __init__(self, path: str):
        self.path = path
        text = self._text()
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        self.columns: list[str] = []
        self.rows: list[list[str]] = []
        # For each row, the line of the file in which the row ends, from 1.
        self.lines: list[int] = []
        try:
            for row in reader:
                if not row:
                    continue
                if not self.columns:
                    self.columns = self._checked_columns([cell.strip() for cell in row])
                    continue
                if len(row) != len(self.columns):
                    raise UserError(
                        f"{self.place(reader.line_num)}: expected {len(self.columns)} cells, found "
                        f"{len(row)}"
                    )
                self.rows.append(row)
                self.lines.append(reader.line_num)
        except csv.Error as e:
            raise UserError(
                f"{self.place(reader.line_num)}: not a row of a CSV file: {e}"
            ) from None
        if not self.columns or not self.rows:
            raise UserError(f"{printable(path)}: expected a header and rows, found none")

    def _text(self):
        """Return the content of the file."""
        try:
            size = stamp_of(self.path).size
            if size > MAX_BYTES:
                raise UserError(
                    f"{printable(self.path)}: expected a table of at most {MAX_BYTES >> 30} GiB, "
                    f"found {size} bytes"
                )
            with open_binary(self.path) as file:
                content = file.read()
        except OSError as e:
            raise unreadable(self.path, e) from None
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            line = content.count(b"\n", 0, e.start) + 1
            raise UserError(
                f"{self.place(line)}: expected UTF-8, found the byte 0x{content[e.start]:02x}"
            ) from None

    def _checked_columns(self, columns):
        line = self.place(1)
        if PATH not in columns:
            hint = did_you_mean(PATH, columns)
            raise UserError(f"{line}: expected a column {PATH}, found {name_list(columns)}{hint}")
        for name in columns:
            if not name or columns.count(name) > 1:
                found_text = "an empty one" if not name else f"{printable(name)} twice"
                raise UserError(f"{line}: expected different column names, found {found_text}")
        return columns

    def place(self, line: int, column: str | None = None) -> str:
        """Return the prefix of a message about a line, or about a cell if `column` is given."""
        text = f"{printable(self.path)}, line {line}"
        return text if column is None else f"{text}, column {printable(column)}"

    def cells(self, column: str, numbers: Sequence[int]) -> list[tuple[str, int]]:
        """Return (cell, line number) of a column for each of the rows with the given numbers."""
        index = self.columns.index(column)
        return [(self.rows[i][index].strip(), self.lines[i]) for i in numbers]

    def parts(self) -> dict[str, list[int]]:
        """Return {part: row numbers} of the parts that exist, or {} without a column `split`.

        Raises UserError if a cell does not name a part.
        """
        if SPLIT not in self.columns:
            return {}
        parts: dict[str, list[int]] = {}
        for i, (cell, line) in enumerate(self.cells(SPLIT, range(len(self.rows)))):
            if cell.lower() not in PART_NAMES:
                hint = did_you_mean(cell.lower(), PART_NAMES)
                raise UserError(
                    f"{self.place(line, SPLIT)}: expected train, validation or test, found "
                    f"{_cell_text(cell)}{hint}"
                )
            parts.setdefault(PART_NAMES[cell.lower()], []).append(i)
        return parts

    def select(
        self,
        part: str | None,
        classes: Sequence[str] | None,
        labelled: bool,
        separator: str | None = None,
    ) -> Rows:
        """Check the image files of a part, and return the part's rows.

        Raises UserError if the part has no rows, a file is missing, or a label or target is
        invalid. Without `classes` of the training set, the class names in the training rows are
        used. `separator` is that of names in the column `labels`, by default the one in
        `SEPARATORS` that occurs in the column.
        """
        parts = self.parts()
        numbers = parts.get(part or "", []) if parts and part else list(range(len(self.rows)))
        if not numbers:
            listing = name_list(list(parts))
            raise UserError(
                f"{printable(self.path)}: expected rows with {part} in the column {SPLIT}, found "
                f"{listing}; a table without this column is used whole"
            )
        if part not in (None, "train") and not parts:
            raise UserError(f"{printable(self.path)}: expected a column {SPLIT} for {part} images")
        training = parts.get("train", numbers) if parts else numbers
        stamps = self._stamps(numbers)
        labels, targets, names, problem = None, None, list(classes or []), None
        try:
            if LABEL in self.columns:
                labels, names = self._labels(numbers, training, classes)
            elif LABELS in self.columns:
                targets, names = self._label_sets(numbers, training, classes, separator)
            elif columns := [name for name in self.columns if name not in (PATH, SPLIT)]:
                targets, names = self._numbers(columns, numbers, classes)
            elif labelled:
                raise UserError(
                    f"{self.place(1)}: expected a column {LABEL}, {LABELS} or columns of targets, "
                    f"found {name_list(self.columns)}"
                )
        except UserError as e:
            if labelled:
                raise
            problem = str(e)
        files = [cell for cell, _ in self.cells(PATH, numbers)]
        return Rows(files, stamps, labels, targets, names, problem)

    def _stamps(self, numbers):
        """Return the Stamp of each image file. Raise UserError if a file is missing."""
        folder = os.path.dirname(self.path)
        with listed(folder):
            return [
                self._stamp(folder, cell, self.place(line, PATH))
                for cell, line in self.cells(PATH, numbers)
            ]

    @staticmethod
    def _stamp(folder, cell, prefix):
        if not cell or "\0" in cell:
            raise UserError(f"{prefix}: expected the path of an image, found {_cell_text(cell)}")
        if is_remote(cell) or (is_remote(folder) and os.path.isabs(cell)):
            raise UserError(
                f"{prefix}: expected a path relative to the table, found {_cell_text(cell)}"
            )
        path = os.path.join(folder, cell)
        try:
            if is_remote(folder):
                return stamp_of(path)
            status = os.stat(path)
        except UserError as e:
            raise UserError(f"{prefix}: {e}") from None
        except (OSError, ValueError) as e:
            is_missing = isinstance(e, FileNotFoundError | NotADirectoryError)
            text = "no such file" if is_missing else reason(e)
            raise UserError(f"{prefix}: {printable(path)}: {text}") from None
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
            raise UserError(f"{prefix}: {printable(path)}: expected a file, found {kind}")
        return stamp(status)

    def _labels(self, numbers, training, classes):
        """Return the labels of the given rows, and the class names."""
        if classes is None:
            names = {cell for cell, _ in self.cells(LABEL, training)}
            classes = sorted_classes(names)
        index = {name: i for i, name in enumerate(classes)}
        labels = []
        for cell, line in self.cells(LABEL, numbers):
            if not cell or cell not in index:
                raise self._unknown_class(cell, line, LABEL, classes)
            labels.append(index[cell])
        return np.array(labels, np.int64), list(classes)

    def _unknown_class(self, cell, line, column, classes):
        prefix = self.place(line, column)
        if not cell:
            return UserError(f"{prefix}: expected a class name, found nothing")
        hint = did_you_mean(cell, classes)
        return UserError(
            f"{prefix}: {_cell_text(cell)} is not one of the classes ({name_list(classes)}){hint}"
        )

    def _label_sets(self, numbers, training, classes, separator):
        """Return the LabelSets of the given rows, and the class names."""
        all_cells = self.cells(LABELS, range(len(self.rows)))
        if separator is None:
            used = {mark: [line for cell, line in all_cells if mark in cell] for mark in SEPARATORS}
            marks = [mark for mark, lines in used.items() if lines]
            if len(marks) > 1:
                line = max(used[mark][0] for mark in marks)
                raise UserError(
                    f"{self.place(line, LABELS)}: expected one separator, found "
                    f"{' and '.join(marks)} in the column (in Python separator= sets it)"
                )
            separator = marks[0] if marks else SEPARATORS[0]

        def names_of(cell):
            return [name.strip() for name in cell.split(separator)] if cell else []

        if classes is None:
            names = {name for cell, _ in self.cells(LABELS, training) for name in names_of(cell)}
            classes = sorted_classes(names)
        index = {name: i for i, name in enumerate(classes)}
        labels, ends = [], []
        for cell, line in self.cells(LABELS, numbers):
            for name in names_of(cell):
                if not name or name not in index:
                    raise self._unknown_class(name, line, LABELS, classes)
                labels.append(index[name])
            ends.append(len(labels))
        if not classes:
            raise UserError(f"{self.place(1, LABELS)}: expected class names, found none")
        sets = LabelSets(np.array(labels, np.int64), np.array(ends, np.int64), len(classes))
        return sets, list(classes)

    def _numbers(self, columns, numbers, classes):
        """Return the numeric targets of the given rows, and class names if all are 0 or 1."""
        table = np.array([self._column(name) for name in columns], np.float32).T
        is_binary = len(columns) > 1 and bool(np.isin(table, (0, 1)).all())
        if classes and list(classes) != columns:
            raise UserError(
                f"{self.place(1)}: expected columns of the classes {name_list(classes)}, found "
                f"{name_list(columns)}"
            )
        targets = table[numbers]
        return (targets if len(columns) > 1 else targets[:, 0]), columns if is_binary else []

    def _column(self, name):
        """Return the numbers of a column."""
        values = []
        for cell, line in self.cells(name, range(len(self.rows))):
            value = _number(cell)
            if value is None:
                raise UserError(
                    f"{self.place(line, name)}: expected a number, found {_cell_text(cell)} "
                    f"(without a column {LABEL} or {LABELS}, all columns except {PATH} and "
                    f"{SPLIT} are targets)"
                )
            values.append(value)
        return values


def _number(cell):
    """Return the number in a cell, or None if the cell has no number that float32 can hold."""
    try:
        value = math.nan if "_" in cell else float(cell)
    except ValueError:
        return None
    return value if abs(value) <= float(np.finfo(np.float32).max) else None


def _cell_text(cell):
    text = printable(cell)
    return "nothing" if not text else text if len(text) <= 80 else f"{text[:77]}..."
