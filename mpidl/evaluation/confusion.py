"""Compute, print and save confusion matrices."""

import csv
import html
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.text import aligned, class_names, printable

LARGEST = 1000  # largest number of classes for which a run counts confusions (8 MB per rank)
MAX_CLASSES = 20  # with more classes, only the most frequent confusions are printed


@dataclass(frozen=True, eq=False, repr=False)
class Confusion:
    """A confusion matrix: how often each class was predicted as each class.

    ``print(confusion)`` shows it as text, a notebook shows it as an HTML table, and `save` writes
    it to a file. For more than 20 classes, the text and the HTML table show only the most frequent
    confusions.

    Parameters
    ----------
    counts : ndarray of int64, shape (K, K)
        Element [i, j] is the number of images, or of pixels, of class i that were predicted as
        class j. Predictions with NaN scores are left out.
    classes : tuple of str
        Names of the K classes.
    is_complete : bool
        Whether no prediction is left out. If not, all fractions are NaN.
    """

    counts: np.ndarray
    classes: tuple[str, ...]
    is_complete: bool = True

    @property
    def accuracy(self) -> float:
        """Fraction of the labels that were predicted correctly; NaN if there are no labels."""
        return float(self._fractions(self.counts.trace(), self.counts.sum()))

    @property
    def recall(self) -> np.ndarray:
        """Fraction of each class that was predicted correctly, (K,); NaN if the class is absent."""
        return self._fractions(self.counts.diagonal(), self.counts.sum(axis=1))

    @property
    def precision(self) -> np.ndarray:
        """Fraction of each class's predictions that are correct, (K,); NaN if there are none."""
        return self._fractions(self.counts.diagonal(), self.counts.sum(axis=0))

    @property
    def f1(self) -> np.ndarray:
        """Harmonic mean of precision and recall, (K,); NaN if a class never occurs."""
        counts = self.counts
        return self._fractions(2 * counts.diagonal(), counts.sum(axis=0) + counts.sum(axis=1))

    @property
    def iou(self) -> np.ndarray:
        """Intersection over union of labels and predictions, (K,); NaN if a class never occurs."""
        counts, correct = self.counts, self.counts.diagonal()
        return self._fractions(correct, counts.sum(axis=0) + counts.sum(axis=1) - correct)

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes that have labels; NaN if there are none."""
        recall = self.recall[self.counts.sum(axis=1) > 0]
        return float(recall.mean()) if len(recall) else float("nan")

    def _fractions(self, parts, totals):
        """Return parts / totals; NaN where a total is 0, and everywhere if the table lacks some."""
        fractions = np.full(np.shape(totals), np.nan)
        if self.is_complete:
            np.divide(parts, totals, out=fractions, where=np.asarray(totals > 0))
        return fractions

    def rows(self) -> list[list[str | int]]:
        """Return the table as rows of cells.

        Returns
        -------
        list of list
            The first row holds headings. One row per class follows, with the name, the counts and
            the recall of the class. The last row holds the precision of each class and the
            accuracy. Control characters in names are escaped.
        """
        names = [printable(name) for name in self.classes]
        table: list[list[str | int]] = [["true \\ predicted", *names, "recall"]]
        for name, counts, recall in zip(names, self.counts, self.recall, strict=True):
            table.append([name, *map(int, counts), _format(recall)])
        return [*table, ["precision", *map(_format, self.precision), _format(self.accuracy)]]

    def most_confused(self, max_pairs: int = MAX_CLASSES) -> list[tuple[str, str, int]]:
        """Return the most frequent confusions.

        Parameters
        ----------
        max_pairs : int
            Maximum number of pairs of classes to return.

        Returns
        -------
        list of (str, str, int)
            True class, predicted class and count of each pair. The largest count comes first; pairs
            with equal counts are in the order of the classes.
        """
        errors = self.counts * (1 - np.eye(len(self.counts), dtype=np.int64))
        order = np.argsort(-errors, axis=None, kind="stable")[:max_pairs]
        cells = [np.unravel_index(i, errors.shape) for i in order]
        pairs = [(self.classes[i], self.classes[j], int(errors[i, j])) for i, j in cells]
        return [pair for pair in pairs if pair[2]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a .csv file, or a picture of it to a .png file.

        Parameters
        ----------
        path : path
            The file to write.

        Raises
        ------
        UserError
            If the path has another suffix, if the file cannot be written, or if the path ends in
            .png and matplotlib is not installed.
        """
        check_path(path, "a confusion matrix")
        if os.fspath(path).lower().endswith(".png"):
            from mpidl.report import confusion as picture

            write_whole(path, picture.draw(self.counts, self.classes, self.accuracy))
            return
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.rows())
        write_whole(path, text.getvalue().encode("utf-8", "backslashreplace"))

    def __repr__(self) -> str:
        labels = int(self.counts.sum())
        return f"Confusion({len(self.classes)} classes, {labels} labels, {self._accuracy_text()})"

    def __str__(self) -> str:
        if len(self.classes) <= MAX_CLASSES:
            return "\n".join(aligned(self.rows()))
        return "\n".join([self._summary(), *aligned(self._pairs())])

    def _repr_html_(self) -> str:
        """Return an HTML table for a notebook. A darker cell has a larger fraction of its row."""
        if len(self.classes) > MAX_CLASSES:
            return f"<p>{self._summary()}</p>\n{_html_table(self._pairs())}"
        shades = self.counts / np.maximum(self.counts.sum(axis=1, keepdims=True), 1)
        return _html_table(self.rows(), shades)

    def _accuracy_text(self):
        return f"accuracy {_format(self.accuracy)}"

    def _summary(self):
        return f"{len(self.classes)} classes, {self._accuracy_text()}; most confused:"

    def _pairs(self):
        pairs = [(printable(i), printable(j), count) for i, j, count in self.most_confused()]
        return [["class", "taken for", "times"], *pairs]


def _html_table(rows, shades=None):
    """Format rows as an HTML table with headings. `shades` colours the cells of the counts."""
    lines = ["<table>", _html_row(rows[0], "th")]
    for i, row in enumerate(rows[1:]):
        coloured = shades is not None and i < len(shades)
        lines.append(_html_row(row, "td", shades[i] if coloured else ()))
    return "\n".join([*lines, "</table>"])


def _html_row(row: Sequence, tag: str, shades: Iterable[float] = ()) -> str:
    """Format an HTML row whose first cell is a heading; `shades` (0 to 1) colour other cells."""
    cells = [f"<th>{html.escape(str(row[0]))}</th>"]
    styles = [f' style="background: rgba(44, 111, 187, {0.8 * shade:.2f})"' for shade in shades]
    styles += [""] * (len(row) - 1 - len(styles))
    for cell, style in zip(row[1:], styles, strict=True):
        cells.append(f"<{tag}{style}>{html.escape(str(cell))}</{tag}>")
    return f"<tr>{''.join(cells)}</tr>"


def check_path(path: str | os.PathLike[str], subject: str) -> None:
    """Raise a UserError that names `subject` unless `Confusion.save` can write such a file."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in (".csv", ".png"):
        raise UserError(
            f"{path}: {subject} is written as .csv or .png, found {suffix or 'no suffix'}"
        )
    if suffix == ".png":
        from mpidl.report.confusion import need_matplotlib

        need_matplotlib(path)


def confusion_matrix(
    labels: np.ndarray | Sequence[int],
    predicted: np.ndarray | Sequence[int],
    classes: Sequence[str] | None = None,
) -> Confusion:
    """Count how often each class was predicted as each class.

    Parameters
    ----------
    labels : array of int
        True classes, numbered from 0, in any shape.
    predicted : array of int
        Predicted classes, in the same shape.
    classes : sequence of str, optional
        Names of the classes; by default "0", "1", ... up to the largest number in the arrays.

    Returns
    -------
    Confusion

    Raises
    ------
    UserError
        If the arrays are not integers of the same shape, or if a class number is out of range.

    Notes
    -----
    The function corresponds to MATLAB's confusionmat and confusionchart.
    """
    labels, predicted = np.asarray(labels), np.asarray(predicted)
    if labels.shape != predicted.shape or labels.dtype.kind not in "iu":
        raise UserError(
            "confusion_matrix: expected labels and predictions as integer arrays of one shape, "
            f"got {labels.dtype} of shape {labels.shape} and {predicted.dtype} of shape "
            f"{predicted.shape}"
        )
    filled = [array for array in (labels, predicted) if array.size]
    highest = max((int(array.max()) for array in filled), default=-1)
    count = highest + 1 if classes is None else len(classes)
    lowest = min((int(array.min()) for array in filled), default=0)
    if lowest < 0 or highest >= count:
        outlier = lowest if lowest < 0 else highest
        raise UserError(f"confusion_matrix: expected labels from 0 to {count - 1}, found {outlier}")
    counts = np.zeros((count, count), np.int64)
    tally(counts, labels, predicted)
    return Confusion(counts, class_names(classes, count))


def is_small(classes: int) -> bool:
    """Return whether a run counts confusions if there are this many classes."""
    return classes <= LARGEST


def tally(counts: np.ndarray, labels: np.ndarray, predicted: np.ndarray) -> None:
    """Add 1 to counts[label, prediction] in place for each image or pixel; counts is (K, K).

    Negative predictions, such as those for NaN scores, are left out.
    """
    labels, predicted = labels.ravel(), predicted.ravel()
    is_defined = predicted >= 0
    np.add.at(counts, (labels[is_defined], predicted[is_defined]), 1)


def _format(fraction):
    return "" if np.isnan(fraction) else f"{fraction:.4f}"
