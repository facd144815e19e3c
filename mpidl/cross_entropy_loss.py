"""The cross-entropy of labels, with class weights, smoothing, an ignored label and focal loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from mpidl import ops
from mpidl.autodiff import Var
from mpidl.blocks import Blocked
from mpidl.data.target_counts import count_labels
from mpidl.errors import UserError
from mpidl.fold import Partial
from mpidl.nn import Network

# (loss,), (loss, number of correct labels), or also the number of labels that count and the weight
# of the mini-batch in a mean over mini-batches.
Sums: TypeAlias = tuple[Partial | Var, ...]


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of labels, for the argument `loss` of training and evaluation.

    ``loss="crossentropy"`` stands for ``CrossEntropy()``.

    Parameters
    ----------
    class_weights : sequence of float or "balanced", optional
        A weight per class, (K,), by which the labels of the class count in the mean. "balanced"
        gives each class the same total weight in the training set: n / (K n_c) for a class with n_c
        of the n images or pixels, as in scikit-learn.
    label_smoothing : float
        Fraction of the target probability that is spread evenly over all classes.
    ignore_label : int, optional
        A label that counts neither in the loss nor in the accuracy, such as 255 for unlabelled
        pixels. It must be outside 0..K-1.
    focal_gamma : float
        Exponent of the focal loss; 0 is the cross-entropy.

    Raises
    ------
    UserError
        If a value is out of range, or if both label_smoothing and focal_gamma are set.

    Notes
    -----
    `ops.softmax_cross_entropy` has the formula and its sources.
    """

    class_weights: Sequence[float] | Literal["balanced"] | None = None
    label_smoothing: float = 0.0
    ignore_label: int | None = None
    focal_gamma: float = 0.0

    def __post_init__(self) -> None:
        weights = self.class_weights
        if isinstance(weights, str) and weights != "balanced":
            raise UserError(f"class_weights: expected numbers or 'balanced', found {weights!r}")
        if weights is not None and not isinstance(weights, str):
            numbers = tuple(float(weight) for weight in weights)
            if not all(0 <= number < np.inf for number in numbers) or not any(numbers):
                raise UserError(f"class_weights: expected numbers >= 0, found {list(numbers)}")
            object.__setattr__(self, "class_weights", numbers)
        if not 0 <= self.label_smoothing < 1:
            raise UserError(
                f"label_smoothing must be at least 0 and below 1, found {self.label_smoothing}"
            )
        if not 0 <= self.focal_gamma < np.inf:
            raise UserError(f"focal_gamma must be at least 0, found {self.focal_gamma}")
        if self.label_smoothing and self.focal_gamma:
            raise UserError(
                f"label_smoothing {self.label_smoothing} and focal_gamma {self.focal_gamma}: "
                "expected at most one of them"
            )

    def __call__(self, net: Network, images: Blocked, labels: Blocked) -> Sums:
        """Return the mean loss and the number of correct labels of a mini-batch.

        Parameters
        ----------
        net : Network
            The network.
        images : Blocked
            Images (N, C, H, W).
        labels : Blocked
            Labels (N,), or one per pixel.

        Returns
        -------
        tuple of Partial
            See `of_scores`.
        """
        return self.of_scores(self.scores(net, images), labels)

    def scores(self, net: Network, images: Blocked) -> Blocked:
        """Return the scores of a network before its softmax.

        Parameters
        ----------
        net : Network
            The network.
        images : Blocked
            Images (N, C, H, W).

        Returns
        -------
        Blocked
            Scores (N, K) or (N, K, ...).
        """
        return net.logits(images)

    def of_scores(self, scores: Blocked | Var, labels: Blocked) -> Sums:
        """Return the mean loss and the number of correct labels, given the scores of a network.

        Parameters
        ----------
        scores : Blocked
            Scores (N, K) or (N, K, ...).
        labels : Blocked
            Labels (N,) or (N, ...).

        Returns
        -------
        tuple of Partial
            The loss and the number of correct labels. With class weights or an ignored label also
            the number of labels that count, and the sum of their weights. Only the loss is
            differentiated.
        """
        ignore_label, weights = self.ignore_label, self.class_weights
        if isinstance(weights, str):
            raise UserError(
                "class_weights='balanced' needs the labels of the training set: use "
                "CrossEntropy.for_images"
            )
        loss = ops.softmax_cross_entropy(
            scores,
            labels,
            class_weights=weights,
            label_smoothing=self.label_smoothing,
            ignore_label=ignore_label,
            focal_gamma=self.focal_gamma,
        )
        correct = ops.correct_count(scores, labels, ignore_label=ignore_label)
        if weights is None and ignore_label is None:
            return loss, correct
        count = ops.label_count(scores, labels, ignore_label=ignore_label)
        weight = ops.label_count(scores, labels, class_weights=weights, ignore_label=ignore_label)
        return loss, correct, count, weight

    def for_images(self, datastore: Any, classes: int, world: Any = None) -> CrossEntropy:
        """Return this loss with numbers instead of "balanced", for a training set. Collective.

        Parameters
        ----------
        datastore : Datastore
            The training set, with a label per image or per pixel.
        classes : int
            Number of classes K.
        world : World, optional
            The ranks that share the reading of the pixels' labels.

        Returns
        -------
        CrossEntropy
            The loss. A class without images or pixels has the weight 0.
        """
        if self.class_weights != "balanced":
            return self
        counts = count_labels(datastore, classes, world)
        weights = counts.sum() / (classes * np.maximum(counts, 1))
        return replace(self, class_weights=tuple(np.where(counts, weights, 0.0).tolist()))

    def is_replayable(self, outputs: int) -> bool:
        """Return whether a CPU may replay the loss: whether no divisor depends on the labels.

        Parameters
        ----------
        outputs : int
            Number of outputs K.

        Returns
        -------
        bool
            Whether a recorded training step may replay it.
        """
        return self.class_weights is None and self.ignore_label is None

    def check(self, classes: int, dataset: str, labels: int | None = None) -> None:
        """Raise a UserError if the weights or the ignored label do not fit the classes.

        Parameters
        ----------
        classes : int
            Number of classes K.
        dataset : str
            Description of the images, for the error message.
        labels : int, optional
            Number of labels that are not ignored; by default K.
        """
        weights, ignored = self.class_weights, self.ignore_label
        labels = classes if labels is None else labels
        if weights is not None and weights != "balanced" and len(weights) != classes:
            raise UserError(
                f"{dataset}: class_weights: expected a number for each of {classes} classes, found "
                f"{len(weights)}"
            )
        if ignored is not None and 0 <= ignored < labels:
            raise UserError(
                f"{dataset}: ignore_label {ignored}: expected a label outside 0..{labels - 1}, "
                "which are the network's classes"
            )
