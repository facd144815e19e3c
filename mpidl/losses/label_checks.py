"""Check the options of label losses, and whether labels match the outputs of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from mpidl.data.transforms.image_targets import moved_shape
from mpidl.errors import UserError
from mpidl.ops.label_checks import squeezed

if TYPE_CHECKING:
    from mpidl.nn import Network

Weights: TypeAlias = Sequence[float] | Literal["balanced"] | None


def checked_weights(name: str, weights: Weights, *, nonzero: bool = True) -> Weights:
    """Return weights as a tuple of floats, "balanced" or None; raise UserError if invalid.

    With `nonzero`, at least one of the numbers must be above 0.
    """
    if isinstance(weights, str) and weights != "balanced":
        raise UserError(f"{name}: expected numbers or 'balanced', found {weights!r}")
    if weights is None or isinstance(weights, str):
        return weights
    numbers = tuple(float(weight) for weight in weights)
    if not all(0 <= number < np.inf for number in numbers) or (nonzero and not any(numbers)):
        raise UserError(f"{name}: expected numbers >= 0, found {list(numbers)}")
    return numbers


def numbers_of(name: str, weights: Weights, owner: str) -> Sequence[float] | None:
    """Return weights that are numbers or None; raise UserError for "balanced"."""
    if isinstance(weights, str):
        raise UserError(
            f"{name}='balanced' needs the labels of the training set: use {owner}.for_images"
        )
    return weights


def check_weight_count(name: str, weights: Weights, count: int, noun: str, dataset: str) -> None:
    """Raise UserError if the weights are numbers, but not one for each class or label."""
    if weights is not None and not isinstance(weights, str) and len(weights) != count:
        raise UserError(
            f"{dataset}: {name}: expected a number for each of {count} {noun}, found {len(weights)}"
        )


def check_ignored(ignore_label: int | None, classes: int, dataset: str) -> None:
    """Raise UserError if the ignored label is one of the classes."""
    if ignore_label is not None and 0 <= ignore_label < classes:
        raise UserError(
            f"{dataset}: ignore_label {ignore_label}: expected a label outside 0..{classes - 1}, "
            "which are the network's classes"
        )


def targets_shape(net: Network, datastore: Any) -> tuple[int, ...] | None:
    """Return the shape of the targets per image that the loss receives, or None without targets.

    Targets that are images or pixel labels are cropped with the input images (`Network.crop`).
    """
    if datastore.targets_shape is None:
        return None
    size = datastore.image_shape[1:] if net.crop is None else net.crop
    return moved_shape(datastore, (datastore.image_shape[0], *size))


def check_labels(name: str, net: Network, datastore: Any, ignore_label: int | None) -> None:
    """Raise UserError unless the labels of the images or targets match the network's classes.

    The ignored label may be outside 0..K-1.
    """
    if datastore.targets_shape is None:
        _check_image_labels(net, datastore, ignore_label)
    else:
        _check_target_labels(name, net, datastore)


def _check_image_labels(net, datastore, ignore_label):
    """Raise UserError unless the outputs have the shape (K,) and the images have labels below K."""
    dataset, outputs = datastore.describe(), net.output_shape
    if datastore.labels is None:
        raise UserError(f"{dataset}: the images have no labels to compare with")
    if len(outputs) != 1:
        raise UserError(
            f"{dataset}: expected a network with outputs (K,), one score per class, found "
            f"outputs of shape {outputs}"
        )
    labels = np.asarray(datastore.labels)
    highest = int(np.max(labels[labels != ignore_label], initial=0))
    if highest >= outputs[0]:
        raise UserError(
            f"{dataset}: expected labels below {outputs[0]}, the number of the network's outputs, "
            f"found {highest}"
        )


def _check_target_labels(name, net, datastore):
    """Raise UserError unless the targets are labels whose shape matches the outputs.

    The targets of an image are an array of labels, such as one label per pixel.
    """
    dataset, outputs = datastore.describe(), net.output_shape
    shape = targets_shape(net, datastore) or ()
    if datastore.targets_dtype.kind not in "iu":
        gray = len(shape) == 3 and shape[0] == 1
        hint = "; pixel_labels=True of dl.data.combined reads pixels as labels" if gray else ""
        raise UserError(
            f"{dataset}: --loss {name}: expected labels, or whole numbers as targets, found "
            'targets that are floats; use --loss mse for these (in Python loss="mse", and '
            f"dl.regression_errors){hint}"
        )
    if len(outputs) < 1 or squeezed(outputs[1:]) != squeezed(shape):
        raise UserError(
            f"{dataset}: --loss {name}: expected a network with outputs (K, "
            f"{', '.join(map(str, shape))}), a score for each class and target, found {outputs}"
        )
