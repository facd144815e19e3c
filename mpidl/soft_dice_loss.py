"""The Dice loss, optionally with the cross-entropy, as a loss for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpidl import ops
from mpidl.autodiff import Var
from mpidl.blocks import Blocked
from mpidl.cross_entropy_loss import CrossEntropy, Sums
from mpidl.errors import UserError
from mpidl.nn import Network
from mpidl.nn.layers import Sigmoid


@dataclass(frozen=True)
class Dice:
    """Soft Dice loss of pixel labels, for the argument `loss` of training and evaluation.

    ``loss="dice"`` stands for ``Dice()``. ``loss="crossentropy+dice"`` stands for
    ``Dice(cross_entropy=CrossEntropy())``, the sum of both losses. The network has one output per
    class, or a single output for the foreground, whose label is 1.

    Parameters
    ----------
    class_weights : sequence of float, optional
        Weight of each class, (K,), such as 0 for the background. By default, all weights are equal.
    smooth : float
        Number of pixels to add to the numerator and the denominator of the similarity.
    ignore_label : int, optional
        A label that is left out of the loss and the accuracy, such as 255 for unlabelled pixels.
    generalized : bool
        Whether a class is weighted by 1 / (number of its pixels)**2.
    cross_entropy : CrossEntropy, optional
        A loss to add. It must have the same `ignore_label`.

    Raises
    ------
    UserError
        If a value is out of range.

    Notes
    -----
    `ops.dice_loss` documents the formula.
    """

    class_weights: Sequence[float] | None = None
    smooth: float = 1.0
    ignore_label: int | None = None
    generalized: bool = False
    cross_entropy: CrossEntropy | None = None

    def __post_init__(self) -> None:
        if self.class_weights is not None:
            if isinstance(self.class_weights, str):
                raise UserError(
                    f"class_weights: expected numbers for the Dice loss, found {self.class_weights}"
                )
            numbers = tuple(float(weight) for weight in self.class_weights)
            if not all(0 <= number < np.inf for number in numbers) or not any(numbers):
                raise UserError(f"class_weights: expected numbers >= 0, found {list(numbers)}")
            object.__setattr__(self, "class_weights", numbers)
        if not 0 <= self.smooth < np.inf:
            raise UserError(f"smooth must be at least 0, found {self.smooth}")
        if self.cross_entropy is not None:
            other = self.cross_entropy.ignore_label
            if other != self.ignore_label:
                raise UserError(
                    f"cross_entropy: expected the ignore_label {self.ignore_label}, found {other}"
                )

    def is_replayable(self, outputs: int) -> bool:
        """Return whether a recorded training step on a CPU may contain this loss.

        Only C kernels can be replayed. No kernel computes the loss of a single output.

        Parameters
        ----------
        outputs : int
            Number of outputs K.

        Returns
        -------
        bool
            Whether the loss can be replayed.
        """
        added = self.cross_entropy
        return outputs > 1 and (added is None or added.is_replayable(outputs))

    def __call__(self, net: Network, images: Blocked, labels: Blocked) -> Sums:
        """Return the mean loss and the number of correct labels of a mini-batch.

        Parameters
        ----------
        net : Network
            The network.
        images : Blocked
            Images (N, C, H, W).
        labels : Blocked
            Labels (N, ...), one per pixel.

        Returns
        -------
        tuple of Partial
            See `of_scores`.
        """
        return self.of_scores(self.scores(net, images), labels)

    def scores(self, net: Network, images: Blocked) -> Blocked:
        """Return the scores of a network before its softmax, or the sigmoid of a single output.

        Parameters
        ----------
        net : Network
            The network.
        images : Blocked
            Images (N, C, H, W).

        Returns
        -------
        Blocked
            Scores (N, K, ...).
        """
        return net.logits(images, Sigmoid) if net.output_shape[0] == 1 else net.logits(images)

    def of_scores(self, scores: Blocked | Var, labels: Blocked) -> Sums:
        """Return the mean loss and the number of correct labels, given the scores of a network.

        Parameters
        ----------
        scores : Blocked
            Scores (N, K, ...).
        labels : Blocked
            Labels (N, ...).

        Returns
        -------
        tuple of Partial
            The loss and the number of correct labels. If `ignore_label` is set, also the number of
            labels that are not ignored. Only the loss can be differentiated.
        """
        ignored = self.ignore_label
        loss = ops.dice_loss(
            scores,
            labels,
            class_weights=self.class_weights,
            smooth=self.smooth,
            ignore_label=ignored,
            generalized=self.generalized,
        )
        if self.cross_entropy is not None:
            loss = loss + self.cross_entropy.of_scores(scores, labels)[0]
        is_single = scores.shape[1] == 1
        count_correct = ops.binary_correct_count if is_single else ops.correct_count
        correct = count_correct(scores, labels, ignore_label=ignored)
        if ignored is None:
            return loss, correct
        count_labels = ops.binary_label_count if is_single else ops.label_count
        return loss, correct, count_labels(scores, labels, ignore_label=ignored)

    def for_images(self, datastore: Any, classes: int, world: Any = None) -> Dice:
        """Return this loss with numbers instead of "balanced" weights in `cross_entropy`.

        Collective.

        Parameters
        ----------
        datastore : Datastore
            The training set.
        classes : int
            Number of classes K.
        world : World, optional
            The ranks, which divide the reading of labels among themselves. By default, this process
            reads all labels.

        Returns
        -------
        Dice
            The loss.
        """
        if self.cross_entropy is None:
            return self
        cross_entropy = self.cross_entropy.for_images(datastore, classes, world)
        return replace(self, cross_entropy=cross_entropy)

    def check(self, classes: int, dataset: str) -> None:
        """Raise UserError if the weights or the ignored label do not match the classes.

        Parameters
        ----------
        classes : int
            Number of outputs K.
        dataset : str
            Description of the images, for the error message.
        """
        CrossEntropy(self.class_weights, ignore_label=self.ignore_label).check(
            classes, dataset, max(classes, 2)
        )
        if self.cross_entropy is not None:
            if classes == 1:
                raise UserError(
                    f"{dataset}: --loss crossentropy+dice: expected a network with an output for "
                    "each class, found one output; use --loss dice"
                )
            self.cross_entropy.check(classes, dataset)
