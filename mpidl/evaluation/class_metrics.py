"""Compute metrics of classifiers from counts of predictions and from rankings of scores.

The names and values are the same as in scikit-learn. Counts are integers, so every metric is exact
on any number of ranks.
"""

from __future__ import annotations

import csv
import html
import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mpidl import losses, ops
from mpidl.core.blocks import Blocked
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.evaluation.options import ALL, NAMES, OF_COUNTS, OF_LABELS, OF_RANKING
from mpidl.evaluation.ranking import Ranking
from mpidl.files import write_whole
from mpidl.text import aligned, class_names, did_you_mean, printable

if TYPE_CHECKING:
    from mpidl.nn import Network

Vector: TypeAlias = np.ndarray

UNDEFINED = -1  # the predicted class of scores that include NaN


@dataclass(frozen=True, eq=False, repr=False)
class ClassMetrics:
    """Metrics of a classifier on a data set.

    ``print(metrics)`` shows a table with a row per class, and a notebook shows it as HTML.

    Parameters
    ----------
    values : dict
        {name: float}. The value of a per-class metric is its mean over the classes for which it is
        defined, or NaN if there is no such class.
    per_class : dict
        {name: ndarray of float64, shape (K,)} for the metrics that are defined for each class.
        An element is NaN if its denominator is 0.
    classes : tuple of str
        Names of the K classes or labels.
    """

    values: dict[str, float]
    per_class: dict[str, np.ndarray]
    classes: tuple[str, ...]

    def __getitem__(self, name: str) -> float:
        """Return the value of a metric."""
        return self.values[name]

    def rows(self) -> list[list[str]]:
        """Return the table as rows of cells: headings, a row per class, and the overall values.

        Returns
        -------
        list of list of str
            Numbers have four decimals. Cells without a value are empty. Control characters in names
            are escaped.
        """
        table = [["class", *self.values]]
        for i, name in enumerate(self.classes):
            vectors = (self.per_class.get(metric) for metric in self.values)
            cells = ("" if v is None else _cell(v[i]) for v in vectors)
            table.append([printable(name), *cells])
        return [*table, ["all", *map(_cell, self.values.values())]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a .csv file.

        Parameters
        ----------
        path : path
            The file to write.

        Raises
        ------
        UserError
            If the file cannot be written.
        """
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.rows())
        write_whole(path, text.getvalue().encode("utf-8", "backslashreplace"))

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value:.6g}" for name, value in self.values.items())
        return f"ClassMetrics({len(self.classes)} classes, {numbers})"

    def __str__(self) -> str:
        return "\n".join(aligned(self.rows()))

    def _repr_html_(self) -> str:
        """Return an HTML table for a notebook."""
        head, *body = self.rows()
        lines = [f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>"]
        for row in body:
            cells = "".join(f"<td>{cell}</td>" for cell in row[1:])
            lines.append(f"<tr><th>{html.escape(row[0])}</th>{cells}</tr>")
        return "\n".join(["<table>", *lines, "</table>"])


def _cell(value):
    return "" if np.isnan(value) else f"{value:.4f}"


def requested(
    request: str | Sequence[str] | None, loss: str | Callable[..., Any], net: Network
) -> tuple[str, ...]:
    """Return the names of the requested metrics, in the order of `NAMES`.

    Raises UserError if a name is unknown, or if a metric does not apply to the outputs of the
    network. `request` has names, as a sequence or separated by commas, or is "all" for all metrics
    of the outputs, whose meaning the loss determines.
    """
    names = request.split(",") if isinstance(request, str) else list(request or ())
    if not names:
        return ()
    for name in names:
        if name not in (ALL, *NAMES):
            raise UserError(
                f"metrics: expected {ALL} or some of {', '.join(NAMES)}, found {name}"
                f"{did_you_mean(str(name), NAMES)}"
            )
    allowed = _allowed(loss, net)
    if ALL in names:
        return allowed
    for name in names:
        if name not in allowed:
            raise UserError(
                f"metrics: {name}: expected {_requirement(name)}; this network and loss support "
                f"{', '.join(allowed) or 'no class metrics'}"
            )
    return tuple(name for name in NAMES if name in names)


def _allowed(loss, net):
    if losses.has_label_scores(loss):
        ranking = OF_RANKING if _pixels(net) == 1 else ()
        return (*(name for name in OF_COUNTS if name != "balanced-accuracy"), *OF_LABELS, *ranking)
    if losses.has_class_scores(loss):
        return (*OF_COUNTS, *(OF_RANKING if _pixels(net) == 1 else ()))
    return ()


def _pixels(net):
    return int(np.prod(net.output_shape[1:], dtype=int))


def _requirement(name):
    if name in OF_RANKING:
        return "one label per class and image, not per pixel"
    return "the loss binary-crossentropy" if name in OF_LABELS else "one class per image or pixel"


class Tally:
    """The counts and scores of an evaluation, from which the metrics are computed.

    The class names of the images are used if the network has none.
    """

    def __init__(
        self,
        names: Sequence[str],
        loss: str | Callable[..., Any],
        net: Network,
        datastore: Datastore,
    ) -> None:
        self.names = tuple(names)
        self.has_labels = losses.has_label_scores(loss)
        outputs = net.output_shape[0]
        classes = outputs if self.has_labels else max(outputs, 2)  # one output: 2 classes
        class_list = net.classes or losses.output_class_names(loss, net, datastore)
        self.classes = class_names(class_list if len(class_list) == classes else None, classes)
        self.correct, self.predicted, self.labelled = np.zeros((3, classes), np.int64)
        self.subsets = np.zeros(2, np.int64)  # images without an error, and all images
        self.samples: dict[tuple[int, int], int] = {}  # {(correct, predicted + labelled): images}
        needs_ranking = any(name in OF_RANKING for name in names)
        self.ranking = Ranking(classes) if needs_ranking else None

    def add(self, scores: Blocked, labels: Blocked) -> None:
        """Count the predictions for this rank's images in a mini-batch.

        Scores are before the softmax or sigmoid, (N, K) or (N, K, ...). Labels are (N,) or (N,
        ...), or targets with the shape of the scores.
        """
        x, y = scores.local(), labels.local()
        if self.has_labels:
            self._add_labels(x, y.reshape(x.shape))
        else:
            self._add_classes(x, y.reshape(len(x), *x.shape[2:]), scores)

    def _add_classes(self, x, labels, scores):
        count = len(self.correct)
        counted = (labels >= 0) & (labels < count)
        labels, predicted = labels[counted], predicted_classes(x)[counted]
        for counts, values in (
            (self.correct, labels[labels == predicted]),
            (self.predicted, predicted[predicted != UNDEFINED]),
            (self.labelled, labels),
        ):
            counts += np.bincount(values, minlength=count)
        if self.ranking is not None:
            p = ops.softmax(scores).local()[counted]
            self.ranking.add(p, labels[:, None] == np.arange(count), None)

    def _add_labels(self, x, targets):
        is_float = targets.dtype.kind == "f"
        labelled = targets > 0.5 if is_float else targets == 1
        counted = np.ones_like(labelled) if is_float else labelled | (targets == 0)
        predicted, labelled = (x > 0) & counted, labelled & counted
        axes = (0, *range(2, x.ndim))
        for counts, values in (
            (self.correct, predicted & labelled),
            (self.predicted, predicted),
            (self.labelled, labelled),
        ):
            counts += values.sum(axis=axes)
        shape = len(x), math.prod(x.shape[1:])  # a rank may have no images
        rows = [values.reshape(shape) for values in (predicted, labelled)]
        self.subsets += [(rows[0] == rows[1]).all(axis=1).sum(), len(x)]
        if "f1-samples" in self.names:
            pairs = (rows[0] & rows[1]).sum(axis=1), rows[0].sum(axis=1) + rows[1].sum(axis=1)
            for key in zip(*(values.tolist() for values in pairs), strict=True):
                self.samples[key] = self.samples.get(key, 0) + 1
        if self.ranking is not None:
            self.ranking.add(x.reshape(shape), rows[1], counted)

    def metrics(self, world: Any, is_defined: bool = True) -> ClassMetrics:
        """Return the metrics for the images of all ranks.

        Collective. All are NaN unless `is_defined`, which is False if the scores include NaN, or if
        there are no labels.
        """
        sums = world.gop("sum", np.stack([self.correct, self.predicted, self.labelled]))
        correct, predicted, labelled = sums
        values, per_class = _of_counts(correct, predicted, labelled, has_labels=self.has_labels)
        subsets = world.gop("sum", self.subsets)
        values["subset-accuracy"] = float(subsets[0] / subsets[1]) if subsets[1] else np.nan
        if "f1-samples" in self.names:
            values["f1-samples"] = _f1_of_samples(world.allgather(self.samples), int(subsets[1]))
        if self.ranking is not None:
            areas, precisions = self.ranking.results(world)
            for name, vector in zip(OF_RANKING, (areas, precisions), strict=True):
                per_class[name] = vector
                values[name] = _mean(vector, ~np.isnan(vector))
        factor = 1.0 if is_defined else np.nan
        return ClassMetrics(
            {name: values[name] * factor for name in self.names},
            {name: per_class[name] * factor for name in self.names if name in per_class},
            self.classes,
        )


def predicted_classes(scores: np.ndarray) -> np.ndarray:
    """Return the predicted classes (n, ...) of scores before softmax or sigmoid, (n, K, ...).

    Among equal scores, the lowest class is predicted, and `UNDEFINED` if a score is NaN. If K is 1,
    the scores are those of the second of two classes.
    """
    is_single = scores.shape[1] == 1
    predicted = (scores[:, 0] > 0).astype(np.int64) if is_single else scores.argmax(axis=1)
    predicted[np.isnan(scores).any(axis=1)] = UNDEFINED
    return predicted


def _of_counts(correct, predicted, labelled, has_labels):
    """Compute metrics from counts, and return {name: value} and {name: values of the classes}.

    Means are over the classes that occur in the labels or in the predictions. With several labels
    per image, means are over all classes. An undefined ratio counts as 0, as in scikit-learn.
    """
    union = predicted + labelled - correct
    per_class = {
        "precision": ratios(correct, predicted),
        "recall": ratios(correct, labelled),
        "f1": ratios(2 * correct, predicted + labelled),
        "iou": ratios(correct, union),
        "dice": ratios(2 * correct, predicted + labelled),
    }
    present = np.ones_like(union, bool) if has_labels else union > 0
    values = {name: _mean(np.nan_to_num(v), present) for name, v in per_class.items()}
    per_class["balanced-accuracy"] = per_class["recall"]
    values["balanced-accuracy"] = _mean(per_class["recall"], labelled > 0)
    total = int(predicted.sum() + labelled.sum())
    values["f1-micro"] = 2 * int(correct.sum()) / total if total else 0.0
    return values, per_class


def ratios(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Return the ratios of integers as float64, with NaN for denominators of 0."""
    quotients = np.full(len(numerators), np.nan)
    np.divide(numerators, denominators, out=quotients, where=denominators > 0)
    return quotients


def _mean(values, chosen_ones):
    return float(values[chosen_ones].mean()) if chosen_ones.any() else float("nan")


def _f1_of_samples(counts_of_ranks, images):
    """Return the mean F1 over images. An image with neither labels nor predictions has F1 = 0."""
    totals: dict[tuple[int, int], int] = {}
    for counts in counts_of_ranks:
        for pair, count in counts.items():
            totals[pair] = totals.get(pair, 0) + count
    terms = (count * (2 * both / size) for (both, size), count in sorted(totals.items()) if size)
    return sum(terms) / images if images else float("nan")
