"""The cross-entropy of labels and its options, as a loss for training and evaluation.

The options are class weights, label smoothing, an ignored label and the focal loss.
"""

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

# The result of a loss function: (loss,), (loss, correct), (loss, correct, count) or (loss, correct,
# count, weight). `correct` is the number of correct labels, `count` the number of labels that are
# not ignored, and `weight` the weight of the mini-batch in a mean over mini-batches.
Sums: TypeAlias = tuple[Partial | Var, ...]


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of labels, for the argument `loss` of training and evaluation.

    ``loss="crossentropy"`` stands for ``CrossEntropy()``.

    Parameters
    ----------
    class_weights : sequence of float or "balanced", optional
        Weight of each class in the mean, (K,). "balanced" gives all classes the same total weight
        in the training set. As in scikit-learn, the weight of a class with n_c of the n images or
        pixels is n / (K n_c). By default, all weights are 1.
    label_smoothing : float
        Fraction of the target probability that is spread evenly over all classes.
    ignore_label : int, optional
        A label outside 0..K-1 that is left out of the loss and the accuracy, such as 255 for
        unlabelled pixels.
    focal_gamma : float
        Exponent of the focal loss; 0 gives the cross-entropy.

    Raises
    ------
    UserError
        If a value is out of range, or if both label_smoothing and focal_gamma are set.

    Notes
    -----
    `ops.softmax_cross_entropy` documents the formula.
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
            Labels (N,), or (N, ...) for one label per pixel.

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
            The loss and the number of correct labels. If `class_weights` or `ignore_label` is set,
            also the number of labels that are not ignored, and the sum of their weights. Only the
            loss can be differentiated.
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
        """Return this loss with numbers instead of "balanced" weights. Collective.

        Parameters
        ----------
        datastore : Datastore
            The training set, with a label per image or per pixel.
        classes : int
            Number of classes K.
        world : World, optional
            The ranks, which divide the reading of the pixels' labels among themselves. By default,
            this process reads all labels.

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
        """Return whether a recorded training step on a CPU may contain this loss.

        A divisor that depends on the labels cannot be replayed.

        Parameters
        ----------
        outputs : int
            Number of outputs K.

        Returns
        -------
        bool
            True unless `class_weights` or `ignore_label` is set.
        """
        return self.class_weights is None and self.ignore_label is None

    def check(self, classes: int, dataset: str, labels: int | None = None) -> None:
        """Raise UserError if the weights or the ignored label do not match the classes.

        Parameters
        ----------
        classes : int
            Number of outputs K. If there are class weights, their number must also be K.
        dataset : str
            Description of the images, for the error message.
        labels : int, optional
            Number of valid labels besides the ignored label; by default K.
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
