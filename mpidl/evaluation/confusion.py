"""Which class was taken for which: a table of counts, and what it says of each class."""

import csv
import io
import os
from dataclasses import dataclass

import numpy as np

from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.report import confusion as picture
from mpidl.text import aligned, class_names

SHOWN = 20  # classes, of which the text has the whole table; of more, the most frequent confusions


@dataclass(frozen=True, eq=False)
class Confusion:
    """How many images of each class, or labels of pixels, were taken for which.

    counts: (K, K) int64, of class [row] taken for class [column]; classes: K names.
    print(confusion) shows the table, `save` writes it, or a picture of it.
    """

    counts: np.ndarray
    classes: tuple

    @property
    def accuracy(self):
        """The share on the diagonal; 0 where there is nothing."""
        return float(self.counts.trace() / max(self.counts.sum(), 1))

    @property
    def recall(self):
        """Of each class, the share that was found: the accuracy by class. (K,), NaN where none of
        the class was there."""
        return _shares(self.counts, self.counts.sum(axis=1))

    @property
    def precision(self):
        """Of what was taken for each class, the share that is of it. (K,), NaN where nothing was
        taken for it."""
        return _shares(self.counts, self.counts.sum(axis=0))

    def rows(self):
        """The table as a list of rows, the first of them headings: for each class its name, its
        counts and its recall; below, the precision of each class, and the accuracy."""
        found = [["true \\ predicted", *self.classes, "recall"]]
        for name, row, recall in zip(self.classes, self.counts, self.recall, strict=True):
            found.append([name, *map(int, row), _share(recall)])
        return [*found, ["precision", *map(_share, self.precision), _share(self.accuracy)]]

    def most_confused(self, most=SHOWN):
        """The most frequent confusions as [(class, taken for, how often)], the first ones first."""
        wrong = self.counts * (1 - np.eye(len(self.counts), dtype=np.int64))
        order = np.argsort(-wrong, axis=None, kind="stable")[:most]
        places = [np.unravel_index(i, wrong.shape) for i in order]
        named = [(self.classes[i], self.classes[j], int(wrong[i, j])) for i, j in places]
        return [row for row in named if row[2]]

    def save(self, path):
        """Write the table (FILE.csv) or a picture of it (FILE.png).

        Raises UserError for another ending, where matplotlib is missing, or where the file cannot
        be written.
        """
        check_path(path, "a confusion matrix")
        if os.fspath(path).lower().endswith(".png"):
            write_whole(path, picture.draw(self.counts, self.classes, self.accuracy))
            return
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.rows())
        write_whole(path, text.getvalue().encode("utf-8", "backslashreplace"))

    def __str__(self):
        if len(self.classes) <= SHOWN:
            return "\n".join(aligned(self.rows()))
        heads = [["class", "taken for", "times"], *self.most_confused()]
        lines = f"{len(self.classes)} classes, accuracy {_share(self.accuracy)}; most confused:"
        return "\n".join([lines, *aligned(heads)])


def check_path(path, what):
    """A UserError where `Confusion.save` could not write such a file."""
    ending = os.path.splitext(os.fspath(path))[1].lower()
    if ending not in (".csv", ".png"):
        raise UserError(f"{path}: {what} is written as .csv or .png, found {ending or 'no ending'}")
    if ending == ".png":
        picture.need_matplotlib(path)


def confusion_matrix(labels, predicted, classes=None):
    """The Confusion of labels and predicted labels, arrays of one shape of whole numbers from 0.

    classes: their names; "0", "1", ... where not given. (MATLAB's confusionmat, confusionchart.)
    """
    labels, predicted = np.asarray(labels), np.asarray(predicted)
    if labels.shape != predicted.shape or labels.dtype.kind not in "iu":
        raise UserError(
            "confusion_matrix: expected labels and predicted labels as whole numbers of one shape, "
            f"got {labels.dtype} of shape {labels.shape} and {predicted.dtype} of shape "
            f"{predicted.shape}"
        )
    some = [array for array in (labels, predicted) if array.size]
    highest = max((int(array.max()) for array in some), default=-1)
    count = highest + 1 if classes is None else len(classes)
    lowest = min((int(array.min()) for array in some), default=0)
    if lowest < 0 or highest >= count:
        found = lowest if lowest < 0 else highest
        raise UserError(f"confusion_matrix: expected labels from 0 to {count - 1}, found {found}")
    counts = np.zeros((count, count), np.int64)
    tally(counts, labels, predicted)
    return Confusion(counts, class_names(classes, count))


def tally(counts, labels, predicted):
    """Add to the (K, K) counts how often [label] was taken for [predicted]."""
    np.add.at(counts, (labels.ravel(), predicted.ravel()), 1)


def _shares(counts, totals):
    found = np.full(len(counts), np.nan)
    np.divide(counts.diagonal(), totals, out=found, where=totals > 0)
    return found


def _share(value):
    return "" if np.isnan(value) else f"{value:.4f}"
