"""The binary cross-entropy of several labels per image, as a loss for training and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpidl import ops
from mpidl.core.blocks import Blocked
from mpidl.core.tape import Var
from mpidl.data.target_counts import count_positives
from mpidl.errors import UserError
from mpidl.losses.base import LabelLoss, Sums
from mpidl.losses.label_checks import (
    Weights,
    check_weight_count,
    checked_weights,
    numbers_of,
)
from mpidl.losses.options import check
from mpidl.nn import Network
from mpidl.ops.label_checks import squeezed

if TYPE_CHECKING:
    from mpidl.nn import Network


@dataclass(frozen=True)
class BinaryCrossEntropy(LabelLoss):
    """Binary cross-entropy of labels that may occur together, for the argument `loss`.

    ``loss="binary-crossentropy"`` stands for ``BinaryCrossEntropy()``. The network has an output
    for each of K labels. If the network ends with `Sigmoid`, the loss uses the input of that layer.
    Targets are the integers 0 and 1, or floats from 0 to 1, (N, K) or (N, K, ...). A network with
    one output can also be trained on images with labels of two classes. The second class is then
    the positive class.

    Parameters
    ----------
    positive_weights : sequence of float or "balanced", optional
        Factor for the positive targets of each label, (K,). "balanced" uses the number of negative
        targets of the label in the training set, divided by the number of positive targets. By
        default, all factors are 1.
    ignore_label : int, optional
        An integer target that is left out of the loss and the accuracy, such as -1 for unknown
        labels.
    focal_gamma : float
        Exponent of the focal loss; 0 gives the binary cross-entropy.

    Raises
    ------
    UserError
        If a value is out of range.

    Notes
    -----
    `ops.sigmoid_cross_entropy` documents the formula.
    """

    positive_weights: Weights = None
    ignore_label: int | None = None
    focal_gamma: float = 0.0
    separate_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        weights = checked_weights("positive_weights", self.positive_weights, nonzero=False)
        object.__setattr__(self, "positive_weights", weights)
        if self.ignore_label in (0, 1):
            raise UserError(
                f"ignore_label {self.ignore_label}: expected a target other than 0 and 1"
            )
        check("focal_gamma", self.focal_gamma)

    @property
    def name(self) -> str:
        return "binary-crossentropy"

    @property
    def is_balanced(self) -> bool:
        return self.positive_weights == "balanced"

    def is_replayable(self, outputs: int) -> bool:
        return self.ignore_label is None

    def of_scores(self, scores: Blocked | Var, targets: Blocked) -> Sums:
        """Return the sums of a mini-batch, given the scores of a network.

        Parameters
        ----------
        scores, targets : Blocked
            Scores and targets, both (N, K) or (N, K, ...).
        """
        ignored = self.ignore_label
        weights = numbers_of("positive_weights", self.positive_weights, "BinaryCrossEntropy")
        loss = ops.sigmoid_cross_entropy(
            scores,
            targets,
            positive_weights=weights,
            ignore_label=ignored,
            focal_gamma=self.focal_gamma,
        )
        correct = ops.binary_correct_count(scores, targets, ignore_label=ignored)
        if ignored is None:
            return loss, correct
        count = ops.binary_label_count(scores, targets, ignore_label=ignored)
        return loss, correct, count, count

    def for_images(self, datastore: Any, outputs: int, world: Any = None) -> BinaryCrossEntropy:
        if self.positive_weights != "balanced":
            return self
        negatives, positives = count_positives(datastore, outputs, world)
        weights = np.where(positives, negatives / np.maximum(positives, 1), 1.0)
        return replace(self, positive_weights=tuple(weights.tolist()))

    def check(self, net: Network, datastore: Any) -> None:
        dataset, outputs, shape = datastore.describe(), net.output_shape, datastore.targets_shape
        if shape is None and datastore.labels is None:
            raise UserError(
                f"{dataset}: --loss binary-crossentropy: expected images with labels or targets, "
                "found none"
            )
        if shape is None and squeezed(outputs):
            raise UserError(
                f"{dataset}: --loss binary-crossentropy: expected a network with one output (for "
                f"one label per image) or targets 0 and 1 of shape {outputs}, found outputs of "
                f"shape {outputs} and one label per image"
            )
        if shape is not None and squeezed(shape) != squeezed(outputs):
            raise UserError(
                f"{dataset}: --loss binary-crossentropy: expected a network with outputs of shape "
                f"{tuple(shape)}, like the targets, found {outputs}"
            )
        if self.ignore_label is not None and shape is not None:
            if datastore.targets_dtype.kind == "f":
                raise UserError(
                    f"{dataset}: ignore_label {self.ignore_label}: expected whole numbers as "
                    "targets, found floats"
                )
        check_weight_count("positive_weights", self.positive_weights, outputs[0], "labels", dataset)
