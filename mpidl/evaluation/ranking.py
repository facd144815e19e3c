"""Compute the area under the ROC curve and the average precision, exact on any number of ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

GATHERED = 1 << 26  # bytes of scores that rank 0 receives at a time (but at least one class)


class Ranking:
    """The scores and labels of an evaluation, stored by class.

    Each rank keeps the scores of its own images, 5 K bytes per image. At the end, rank 0 receives
    the scores of all images, a few classes at a time.
    """

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self._scores: list[np.ndarray] = []
        self._states: list[np.ndarray] = []  # 1 if labelled, 0 if not, 2 if not counted

    def add(self, scores: np.ndarray, labelled: np.ndarray, counted: np.ndarray | None) -> None:
        """Add images with scores (n, K) and labels (n, K), which say whether the image has the
        class. Only entries that are true in `counted` count; None counts all. A larger score means
        that the class is more likely.
        """
        states = labelled.astype(np.uint8)
        if counted is not None:
            states[~counted.reshape(states.shape)] = 2
        self._scores.append(scores.astype(np.float32, copy=False).T.copy())
        self._states.append(states.T.copy())

    def results(self, world: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the areas and the average precisions of the classes, two float64 arrays (K,).

        Collective. Both values of a class are NaN if the class has no positive images or a NaN
        score. The area is also NaN if the class has no negative images.
        """
        empty = np.zeros((self.classes, 0), np.uint8)
        scores = np.concatenate([empty.astype(np.float32), *self._scores], axis=1)
        states = np.concatenate([empty, *self._states], axis=1)
        self._scores, self._states = [], []
        images = world.gop("sum", scores.shape[1])
        step = max(1, GATHERED // max(5 * images, 1))
        rows = []
        for first in range(0, self.classes, step):
            part = slice(first, first + step)
            parts = world.gather((scores[part], states[part]))
            if parts is not None:
                columns = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
                rows += [area_and_precision(x, state) for x, state in zip(*columns, strict=True)]
        areas, precisions = np.array(world.broadcast(rows if rows else None)).reshape(-1, 2).T
        return areas, precisions


def area_and_precision(scores: np.ndarray, states: np.ndarray) -> tuple[float, float]:
    """Return the area under the ROC curve and the average precision of one class, or NaN.

    `states` is 1 if the image has the class, 0 if not, 2 if the image does not count. The area is
    the fraction of the pairs of a positive and a negative image in which the positive image has the
    larger score; a pair with equal scores counts one half (Mann and Whitney, 1947). The average
    precision is the sum of precision times the increase of recall over the distinct scores, from
    the largest to the smallest. scikit-learn uses the same definitions.
    """
    counted = states < 2
    scores, positive = scores[counted], states[counted] == 1
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if np.isnan(scores).any() or not positives:
        return math.nan, math.nan
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(positive[order], dtype=np.int64)
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # the last of equal scores
    hits, misses = hits[last], last + 1 - hits[last]
    new_hits, new_misses = np.diff(hits, prepend=0), np.diff(misses, prepend=0)
    # Twice the number of pairs in which the positive image has the larger score. A tie counts 1.
    doubled = int((new_misses * (2 * hits - new_hits)).sum())
    area = doubled / (2 * positives * negatives) if negatives else math.nan
    precision = math.fsum((new_hits * (hits / (last + 1))).tolist()) / positives
    return area, precision
