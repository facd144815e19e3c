"""Losses of the overlap of regions of pixels, for training and evaluation."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import ops
from mpidl.core.blocks import Blocked
from mpidl.core.fold import Partial
from mpidl.core.tape import Var
from mpidl.errors import UserError
from mpidl.losses.base import LabelLoss, Sums
from mpidl.losses.cross_entropy_loss import CrossEntropy
from mpidl.losses.label_checks import (
    check_ignored,
    check_labels,
    check_weight_count,
    checked_weights,
)
from mpidl.ops.overlap import EPSILON, check_error_weights

if TYPE_CHECKING:
    from mpidl.nn import Network

__all__ = ["Dice", "Tversky"]


@dataclass(frozen=True)
class OverlapLoss(LabelLoss):
    """A loss of pixel labels with a similarity of each class's region in an image.

    Subclasses define `name` and `_overlap`. `Dice` documents the fields.
    """

    class_weights: Sequence[float] | None = None
    smooth: float | None = 1.0
    ignore_label: int | None = None

    def __post_init__(self) -> None:
        weights = self.class_weights
        if isinstance(weights, str):
            kind = type(self).__name__
            raise UserError(f"class_weights: expected numbers for the {kind} loss, found {weights}")
        object.__setattr__(self, "class_weights", checked_weights("class_weights", weights))
        if self.smooth is None or not 0 <= self.smooth < np.inf:
            raise UserError(f"smooth must be at least 0, found {self.smooth}")

    @abc.abstractmethod
    def _overlap(self, scores: Blocked | Var, labels: Blocked) -> Partial | Var:
        """Return the mean loss over the images, as an op computes it."""

    def label_classes(self, outputs: int) -> int:
        return max(outputs, 2)

    def is_replayable(self, outputs: int) -> bool:
        return outputs > 1

    def _uses_sigmoid(self, net):
        return net.output_shape[0] == 1

    def of_scores(self, scores: Blocked | Var, labels: Blocked) -> Sums:
        loss, ignored = self._overlap(scores, labels), self.ignore_label
        is_single = scores.shape[1] == 1
        count_correct = ops.binary_correct_count if is_single else ops.correct_count
        correct = count_correct(scores, labels, ignore_label=ignored)
        if ignored is None:
            return loss, correct
        count_labels = ops.binary_label_count if is_single else ops.label_count
        return loss, correct, count_labels(scores, labels, ignore_label=ignored)

    def check(self, net: Network, datastore: Any) -> None:
        if net.output_shape:
            self._check_classes(net.output_shape[0], datastore.describe())
        check_labels(self.name, net, datastore, self.ignore_label)

    def _check_classes(self, outputs, dataset):
        check_weight_count("class_weights", self.class_weights, outputs, "classes", dataset)
        check_ignored(self.ignore_label, max(outputs, 2), dataset)


@dataclass(frozen=True)
class Dice(OverlapLoss):
    """Soft Dice loss of pixel labels, for the argument `loss` of training and evaluation.

    ``loss="dice"`` stands for ``Dice()``. ``loss="crossentropy+dice"`` stands for
    ``Dice(cross_entropy=CrossEntropy())``, the sum of both losses. The network has one output per
    class, or a single output for the foreground, whose label is 1.

    Parameters
    ----------
    class_weights : sequence of float, optional
        Weight of each class, (K,), such as 0 for the background. By default, all weights are equal.
    smooth : float, optional
        Number to add to the numerator and the denominator of the similarity. The default is 1
        pixel, or 1e-8 if `generalized` is True.
    ignore_label : int, optional
        A label that is left out of the loss and the accuracy, such as 255 for unlabelled pixels.
    generalized : bool
        Whether to compute the generalized Dice loss, in which a class is weighted by
        1 / (number of its pixels)**2.
    cross_entropy : CrossEntropy, optional
        A cross-entropy loss to add, with the same `ignore_label`.

    Raises
    ------
    UserError
        If a value is out of range.

    Notes
    -----
    `ops.dice_loss` documents the formula.
    """

    smooth: float | None = None
    generalized: bool = False
    cross_entropy: CrossEntropy | None = None

    def __post_init__(self) -> None:
        if self.smooth is None:  # a checkpoint stores the repr, in which the default is a number
            object.__setattr__(self, "smooth", EPSILON if self.generalized else 1.0)
        super().__post_init__()
        other = self.ignore_label if self.cross_entropy is None else self.cross_entropy.ignore_label
        if other != self.ignore_label:
            raise UserError(
                f"cross_entropy: expected the ignore_label {self.ignore_label}, found {other}"
            )

    @property
    def name(self) -> str:
        return "dice" if self.cross_entropy is None else "crossentropy+dice"

    @property
    def is_balanced(self) -> bool:
        return self.cross_entropy is not None and self.cross_entropy.is_balanced

    def is_replayable(self, outputs: int) -> bool:
        added = self.cross_entropy
        return outputs > 1 and (added is None or added.is_replayable(outputs))

    def _overlap(self, scores: Blocked | Var, labels: Blocked) -> Partial | Var:
        loss = ops.dice_loss(
            scores,
            labels,
            class_weights=self.class_weights,
            smooth=self.smooth,
            ignore_label=self.ignore_label,
            generalized=self.generalized,
        )
        added = self.cross_entropy
        return loss if added is None else loss + added.of_scores(scores, labels)[0]

    def for_images(self, datastore: Any, outputs: int, world: Any = None) -> Dice:
        if self.cross_entropy is None:
            return self
        cross_entropy = self.cross_entropy.for_images(datastore, outputs, world)
        return replace(self, cross_entropy=cross_entropy)

    def _check_classes(self, outputs, dataset):
        super()._check_classes(outputs, dataset)
        if self.cross_entropy is not None:
            if outputs == 1:
                raise UserError(
                    f"{dataset}: --loss crossentropy+dice: expected a network with an output for "
                    "each class, found one output; use --loss dice"
                )
            self.cross_entropy.check_classes(outputs, dataset)


@dataclass(frozen=True)
class Tversky(OverlapLoss):
    """Tversky loss of pixel labels, for the argument `loss` of training and evaluation.

    ``loss="tversky"`` stands for ``Tversky()``. The network has one output per class, or a single
    output for the foreground, whose label is 1.

    Parameters
    ----------
    class_weights : sequence of float, optional
        Weight of each class, (K,), such as 0 for the background. By default, all weights are equal.
    smooth : float
        Number to add to the numerator and the denominator of the similarity.
    ignore_label : int, optional
        A label that is left out of the loss and the accuracy, such as 255 for unlabelled pixels.
    alpha, beta : float
        Weights of the false positives and the false negatives, numbers >= 0, at least one of them
        above 0.

    Raises
    ------
    UserError
        If a value is out of range.

    Notes
    -----
    `ops.tversky_loss` documents the formula.
    """

    alpha: float = field(default=0.3, kw_only=True)
    beta: float = field(default=0.7, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            check_error_weights("Tversky", self.alpha, self.beta)
        except ValueError as error:
            raise UserError(str(error)) from None

    @property
    def name(self) -> str:
        return "tversky"

    def _overlap(self, scores: Blocked | Var, labels: Blocked) -> Partial | Var:
        return ops.tversky_loss(scores, labels, **asdict(self))
