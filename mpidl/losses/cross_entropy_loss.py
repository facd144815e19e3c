"""The cross-entropy of labels and its options, as a loss for training and evaluation.

The options are class weights, label smoothing, an ignored label and the focal loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import ops
from mpidl.core.blocks import Blocked
from mpidl.core.tape import Var
from mpidl.data.target_counts import count_labels
from mpidl.errors import UserError
from mpidl.losses.base import LabelLoss, Sums
from mpidl.losses.label_checks import (
    Weights,
    check_ignored,
    check_labels,
    check_weight_count,
    checked_weights,
    numbers_of,
)
from mpidl.losses.options import check

if TYPE_CHECKING:
    from mpidl.nn import Network


@dataclass(frozen=True)
class CrossEntropy(LabelLoss):
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

    class_weights: Weights = None
    label_smoothing: float = 0.0
    ignore_label: int | None = None
    focal_gamma: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "class_weights", checked_weights("class_weights", self.class_weights)
        )
        check("label_smoothing", self.label_smoothing)
        check("focal_gamma", self.focal_gamma)
        if self.label_smoothing and self.focal_gamma:
            raise UserError(
                f"label_smoothing {self.label_smoothing} and focal_gamma {self.focal_gamma}: "
                "expected at most one of them"
            )

    def of_scores(self, scores: Blocked | Var, labels: Blocked) -> Sums:
        ignore_label = self.ignore_label
        weights = numbers_of("class_weights", self.class_weights, "CrossEntropy")
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

    def for_images(self, datastore: Any, outputs: int, world: Any = None) -> CrossEntropy:
        if self.class_weights != "balanced":
            return self
        counts = count_labels(datastore, outputs, world)
        weights = counts.sum() / (outputs * np.maximum(counts, 1))
        return replace(self, class_weights=tuple(np.where(counts, weights, 0.0).tolist()))

    @property
    def name(self) -> str:
        return "crossentropy"

    @property
    def is_balanced(self) -> bool:
        return self.class_weights == "balanced"

    def is_replayable(self, outputs: int) -> bool:
        return self.class_weights is None and self.ignore_label is None

    def check(self, net: Network, datastore: Any) -> None:
        if net.output_shape:
            self.check_classes(net.output_shape[0], datastore.describe())
        check_labels(self.name, net, datastore, self.ignore_label)

    def check_classes(self, classes: int, dataset: str) -> None:
        """Raise UserError if the weights or the ignored label do not match the classes.

        Parameters
        ----------
        classes : int
            Number of outputs K. If there are class weights, their number must also be K.
        dataset : str
            Description of the images, for the error message.
        """
        check_weight_count("class_weights", self.class_weights, classes, "classes", dataset)
        check_ignored(self.ignore_label, classes, dataset)
