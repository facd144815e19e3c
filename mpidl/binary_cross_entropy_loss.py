"""The binary cross-entropy of several labels per image, as a loss for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mpidl import ops
from mpidl.autodiff import Var
from mpidl.blocks import Blocked
from mpidl.cross_entropy_loss import Sums
from mpidl.data.target_counts import count_positives
from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.nn.layers import Sigmoid
from mpidl.ops.label_checks import squeezed


@dataclass(frozen=True)
class BinaryCrossEntropy:
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

    positive_weights: Sequence[float] | Literal["balanced"] | None = None
    ignore_label: int | None = None
    focal_gamma: float = 0.0

    def __post_init__(self) -> None:
        weights = self.positive_weights
        if isinstance(weights, str) and weights != "balanced":
            raise UserError(f"positive_weights: expected numbers or 'balanced', found {weights!r}")
        if weights is not None and not isinstance(weights, str):
            numbers = tuple(float(weight) for weight in weights)
            if not all(0 <= number < np.inf for number in numbers):
                raise UserError(f"positive_weights: expected numbers >= 0, found {list(numbers)}")
            object.__setattr__(self, "positive_weights", numbers)
        if self.ignore_label in (0, 1):
            raise UserError(
                f"ignore_label {self.ignore_label}: expected a target other than 0 and 1"
            )
        if not 0 <= self.focal_gamma < np.inf:
            raise UserError(f"focal_gamma must be at least 0, found {self.focal_gamma}")

    def is_replayable(self, outputs: int) -> bool:
        """Return whether a recorded training step on a CPU may contain this loss.

        A divisor that depends on the targets cannot be replayed.

        Parameters
        ----------
        outputs : int
            Number of outputs K.

        Returns
        -------
        bool
            True unless a label is ignored.
        """
        return self.ignore_label is None

    def __call__(self, net: Network, images: Blocked, targets: Blocked) -> Sums:
        """Return the mean loss and the number of correct labels of a mini-batch.

        Parameters
        ----------
        net : Network
            The network.
        images : Blocked
            Images (N, C, H, W).
        targets : Blocked
            Targets in the shape of the outputs.

        Returns
        -------
        tuple of Partial
            See `of_scores`.
        """
        return self.of_scores(self.scores(net, images), targets)

    def scores(self, net: Network, images: Blocked) -> Blocked:
        """Return the scores of a network before its sigmoid.

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
        return net.logits(images, Sigmoid)

    def of_scores(self, scores: Blocked | Var, targets: Blocked) -> Sums:
        """Return the mean loss and the number of correct labels, given the scores of a network.

        Parameters
        ----------
        scores : Blocked
            Scores (N, K) or (N, K, ...).
        targets : Blocked
            Targets in the shape of the scores.

        Returns
        -------
        tuple of Partial
            The loss and the number of correct labels. If `ignore_label` is set, also the number of
            targets that are not ignored, twice (see `cross_entropy_loss.Sums`). Only the loss can
            be differentiated.
        """
        ignored, weights = self.ignore_label, self.positive_weights
        if isinstance(weights, str):
            raise UserError(
                "positive_weights='balanced' needs the targets of the training set: use "
                "BinaryCrossEntropy.for_images"
            )
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
        """Return this loss with numbers instead of "balanced". Collective.

        Parameters
        ----------
        datastore : Datastore
            The training set.
        outputs : int
            Number of labels K.
        world : World, optional
            The ranks, which divide the reading of targets among themselves. By default, this
            process reads all targets.

        Returns
        -------
        BinaryCrossEntropy
            The loss. A label without positive targets has the weight 1.
        """
        if self.positive_weights != "balanced":
            return self
        negatives, positives = count_positives(datastore, outputs, world)
        weights = np.where(positives, negatives / np.maximum(positives, 1), 1.0)
        return replace(self, positive_weights=tuple(weights.tolist()))

    def check(self, net: Network, datastore: Any) -> None:
        """Raise UserError if the outputs, the targets and the weights do not match.

        Parameters
        ----------
        net : Network
            The network.
        datastore : Datastore
            The images with their targets.
        """
        dataset, outputs, shape = datastore.describe(), net.output_shape, datastore.targets_shape
        weights = self.positive_weights
        if shape is None and datastore.labels is None:
            raise UserError(
                f"{dataset}: --loss binary-crossentropy: expected images with labels or targets, "
                "found none"
            )
        if shape is None and squeezed(outputs):
            raise UserError(
                f"{dataset}: --loss binary-crossentropy: expected a network with one output for "
                f"images with one label, or targets 0 and 1 of shape {outputs}, found outputs of "
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
        if not (weights is None or isinstance(weights, str)) and len(weights) != outputs[0]:
            raise UserError(
                f"{dataset}: positive_weights: expected a number for each of {outputs[0]} labels, "
                f"found {len(weights)}"
            )
