"""Count the target values of a training set, to derive class and label weights from the counts."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np

from mpidl.data.checks import read_targets
from mpidl.data.datastore import Datastore

CHUNK = 256  # number of images whose targets are read at a time

# Counts per datastore, so that a run reads all targets only once.
_counts: weakref.WeakKeyDictionary[Datastore, dict[tuple, np.ndarray]] = weakref.WeakKeyDictionary()


def count_labels(datastore: Datastore, classes: int, world: Any = None) -> np.ndarray:
    """Count how often each label 0..classes-1 occurs among all images or pixels.

    Collective. Other labels are not counted. Without a world, this rank reads all targets. Returns
    int64 (K,), the same on all ranks.
    """
    if datastore.targets_shape is None:
        return _bincount(np.asarray(datastore.labels), classes)
    return _of_targets(datastore, ("labels", classes), world, lambda t: _bincount(t, classes))


def count_positives(datastore: Datastore, labels: int, world: Any = None) -> np.ndarray:
    """Count the negative and positive targets of each label, int64 (2, K), the same on all ranks.

    Collective. Targets have the shape (K,) or (K, ...), or are labels 0 and 1. Floats above 1/2
    count as 1, other floats as 0. Integers other than 0 and 1 are not counted. Without a world,
    this rank reads all targets.
    """
    if datastore.targets_shape is None:
        return _zeros_and_ones(np.asarray(datastore.labels), labels)
    key = "positives", labels
    return _of_targets(datastore, key, world, lambda targets: _zeros_and_ones(targets, labels))


def _bincount(labels, classes):
    valid = labels[(labels >= 0) & (labels < classes)]
    return np.bincount(valid.ravel().astype(np.int64), minlength=classes)


def _zeros_and_ones(targets, labels):
    rows = targets.reshape(len(targets), labels, math.prod(targets.shape[1:]) // labels)
    ones = rows > 0.5 if rows.dtype.kind == "f" else rows == 1
    zeros = ~ones if rows.dtype.kind == "f" else rows == 0
    return np.stack([zeros.sum(axis=(0, 2)), ones.sum(axis=(0, 2))])


def _of_targets(datastore, key, world, count):
    """Return the sum of count(targets) over all images."""
    counts = _counts.setdefault(datastore, {})
    if key not in counts:
        rank, size = (0, 1) if world is None else (world.rank, world.size)
        total = count(np.zeros((0, *datastore.targets_shape), datastore.targets_dtype))
        for first in range(rank * CHUNK, len(datastore), size * CHUNK):
            indices = np.arange(first, min(first + CHUNK, len(datastore)))
            total += count(read_targets(datastore, indices))
        counts[key] = total if world is None else world.gop("sum", total)
    return counts[key]
