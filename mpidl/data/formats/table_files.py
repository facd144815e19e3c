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
from collections.abc import Iterable, Sequence

import numpy as np

from mpidl.data.formats.format import PART_NAMES
from mpidl.data.formats.image_files import MAX_BYTES
from mpidl.data.formats.image_list import LabelSets, Listing
from mpidl.data.paths import listed, open_binary, reading, stamp_of
from mpidl.data.urls import is_remote
from mpidl.errors import UserError
from mpidl.files import Stamp
from mpidl.text import did_you_mean, name_list, printable, sorted_classes

PATH, LABEL, LABELS, SPLIT = "path", "label", "labels", "split"
SEPARATORS = (";", "|")  # possible separators of the names in a cell of the column `labels`


class Table:
    """The cells of a table, with their line numbers for messages.

    Raises UserError if the file cannot be read, is not a CSV file in UTF-8, has no rows or no
    column `path`, or if the number of cells in a row differs from the number of columns.
    """

    def __init__(self, path: str):
        self.path, self.rows = path, list[list[str]]()
        self.lines: list[int] = []  # for each row, the line of the file in which it ends, from 1
        reader = csv.reader(io.StringIO(self._text(), newline=""), strict=True)
        try:
            rows = (row for row in reader if row)
            self.columns = self._checked_columns([cell.strip() for cell in next(rows, [])])
            for row in rows:
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
        if not self.rows:
            raise UserError(f"{printable(path)}: expected a header and rows, found none")

    def _text(self):
        """Return the content of the file."""
        with reading(self.path):
            size = stamp_of(self.path).size
            if size > MAX_BYTES:
                raise UserError(
                    f"{printable(self.path)}: expected a table of at most {MAX_BYTES >> 30} GiB, "
                    f"found {size} bytes"
                )
            with open_binary(self.path) as file:
                content = file.read()
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            line = content.count(b"\n", 0, e.start) + 1
            raise UserError(
                f"{self.place(line)}: expected UTF-8, found the byte 0x{content[e.start]:02x}"
            ) from None

    def _checked_columns(self, columns):
        line = self.place(1)
        if columns and PATH not in columns:
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

    def cells(self, column: str, numbers: Iterable[int] | None = None) -> list[tuple[str, int]]:
        """Return (cell, line number) of a column for the rows with the given numbers, or all."""
        index = self.columns.index(column)
        numbers = range(len(self.rows)) if numbers is None else numbers
        return [(self.rows[i][index].strip(), self.lines[i]) for i in numbers]

    def parts(self) -> dict[str, list[int]]:
        """Return {part: row numbers} of the parts that exist, or {} without a column `split`.

        Raises UserError if a cell does not name a part.
        """
        parts: dict[str, list[int]] = {}
        for i, (cell, line) in enumerate(self.cells(SPLIT) if SPLIT in self.columns else ()):
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
    ) -> Listing:
        """Check the image files of a part, and return them with their labels or targets.

        Raises UserError if the part has no rows, a file is missing, or a label or target is
        invalid. Without `classes` of the training set, the class names in the training rows are
        used. `separator` is that of names in the column `labels`, by default the one in
        `SEPARATORS` that occurs in the column.
        """
        parts = self.parts()
        if part not in (None, "train") and not parts:
            raise UserError(f"{printable(self.path)}: expected a column {SPLIT} for {part} images")
        numbers = parts.get(part, []) if parts and part else list(range(len(self.rows)))
        if not numbers:
            raise UserError(
                f"{printable(self.path)}: expected rows with {part} in the column {SPLIT}, found "
                f"{name_list(list(parts))}; a table without this column is used whole"
            )
        training = parts.get("train", numbers)
        with listed(os.path.dirname(self.path)):
            stamps = [self._stamp(cell, line) for cell, line in self.cells(PATH, numbers)]
        labels, targets, names, problem = None, None, list(classes or []), None
        try:
            if LABEL in self.columns:
                labels, _, names = self._labels(LABEL, numbers, training, classes, None)
            elif LABELS in self.columns:
                mark = separator or self._separator()
                members, ends, names = self._labels(LABELS, numbers, training, classes, mark)
                targets = LabelSets(members, ends, len(names))
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
        return Listing(files, stamps, labels, targets, names, problem)

    def _stamp(self, cell: str, line: int) -> Stamp:
        """Return the Stamp of an image file. Raise UserError if the file is missing."""
        folder, place = os.path.dirname(self.path), self.place(line, PATH)
        if not cell or "\0" in cell:
            raise UserError(f"{place}: expected the path of an image, found {_cell_text(cell)}")
        if is_remote(cell) or (is_remote(folder) and os.path.isabs(cell)):
            raise UserError(
                f"{place}: expected a path relative to the table, found {_cell_text(cell)}"
            )
        path = os.path.join(folder, cell)
        try:
            with reading(path):
                return stamp_of(path)
        except UserError as e:
            raise UserError(f"{place}: {e}") from None

    def _labels(self, column, numbers, training, classes, separator):
        """Return the labels of the given rows, the end of each row's labels, and the class names.

        A cell holds one name, or names joined by the separator.
        """

        def names_of(cell):
            if separator is None:
                return [cell]
            return [name.strip() for name in cell.split(separator)] if cell else []

        if classes is None:
            names = {name for cell, _ in self.cells(column, training) for name in names_of(cell)}
            classes = sorted_classes(names)
        index = {name: i for i, name in enumerate(classes) if name}
        labels, ends = [], []
        for cell, line in self.cells(column, numbers):
            for name in names_of(cell):
                if name not in index:
                    text = f"{_cell_text(name)} is not one of the classes ({name_list(classes)})"
                    text += did_you_mean(name, classes)
                    text = text if name else "expected a class name, found nothing"
                    raise UserError(f"{self.place(line, column)}: {text}")
                labels.append(index[name])
            ends.append(len(labels))
        if not classes:
            raise UserError(f"{self.place(1, column)}: expected class names, found none")
        return np.array(labels, np.int64), np.array(ends, np.int64), list(classes)

    def _separator(self):
        """Return the separator of names in the column `labels`."""
        lines: dict[str, int] = {}  # {separator: line in which it occurs first}
        for cell, line in self.cells(LABELS):
            for mark in SEPARATORS:
                if mark in cell:
                    lines.setdefault(mark, line)
        if len(lines) > 1:
            raise UserError(
                f"{self.place(max(lines.values()), LABELS)}: expected one separator, found "
                f"{' and '.join(SEPARATORS)} in the column (in Python separator= sets it)"
            )
        return next(iter(lines), SEPARATORS[0])

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
        for cell, line in self.cells(name):
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
