"""Class scores before softmax or sigmoid, and their gradients.

The score of an image depends on this image alone, so a gradient needs no sum over images and no
communication: its seed is 1 for the explained class of each image.
"""

from __future__ import annotations

import numpy as np

from mpidl import losses, ops
from mpidl.core.blocks import Blocked, from_images
from mpidl.core.tape import Var, backward, value_of
from mpidl.core.values import as_type, is_device_array
from mpidl.nn import Network
from mpidl.nn.layers import Layer, Sigmoid, Softmax
from mpidl.nn.layers.base import Value


def last_activation(net: Network) -> type[Layer]:
    """Return the class of a last layer that is left out of the scores."""
    return Sigmoid if isinstance(net.layers[-1], Sigmoid) else Softmax


def score_layer(net: Network) -> str:
    """Return the name of the layer whose outputs are the scores."""
    if isinstance(net.layers[-1], last_activation(net)):
        return net.reads[-1][0]
    return net.layer_names[-1]


def is_regression(net: Network) -> bool:
    """Return whether the outputs are numbers, not scores of classes."""
    return net.classes == ()


def has_one_score(net: Network) -> bool:
    """Return whether the only output is the score of the second of two classes."""
    return net.output_shape[0] == 1 and not is_regression(net)


def count_classes(net: Network) -> int:
    """Return the number of classes that can be explained."""
    return 2 if has_one_score(net) else net.output_shape[0]


def table_of_scores(net: Network, outputs: Blocked) -> np.ndarray:
    """Return the score of each class for this rank's images, float64 (n, classes).

    The score of a class of pixels is the sum over all pixels. If there is only one output, the
    score of the first of the two classes is its negative.
    """
    local = outputs.local().astype(np.float64)
    # image by image, because NumPy's order of summation may depend on the shape of the array
    rows = [image.reshape(len(image), -1).sum(axis=1) for image in local]
    table = np.array(rows, np.float64).reshape(len(local), net.output_shape[0])
    return np.concatenate([-table, table], axis=1) if has_one_score(net) else table


def table_of_probabilities(net: Network, outputs: Blocked) -> np.ndarray:
    """Return the probability of each class for this rank's images, float32 (n, classes).

    The probabilities are NaN if the outputs are numbers or scores of pixels.
    """
    if is_regression(net) or len(net.output_shape) > 1:
        return np.full((len(outputs.local()), count_classes(net)), np.nan, np.float32)
    if has_one_score(net) or losses.has_separate_labels(net):
        table = ops.sigmoid(outputs).local()
        return np.concatenate([1 - table, table], axis=1) if has_one_score(net) else table
    return ops.softmax(outputs).local()


def entries_of(table: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Return the entry of each row's class; NaN for class -1, of an image with NaN scores."""
    entries = table[np.arange(len(table)), classes]
    return np.where(classes < 0, np.nan, entries)


def local_value(values: np.ndarray, like: Blocked) -> Blocked:
    """Convert an entry per image of this rank, (n, ...), to a Blocked value.

    The value has the mini-batch, the dtype and the device of `like`.
    """
    lanes = as_type(from_images(values.astype(np.float32), like.batch).raw, like.storage)
    if is_device_array(like.raw):
        from mpidl.backends.gpu import array

        lanes = array.placed(lanes, like.raw)
    return Blocked(lanes, like.batch)


def gradient(net: Network, scores: Value, leaf: Var, classes: np.ndarray) -> np.ndarray:
    """Return the gradient of the score of each image's class with respect to a leaf, (n, ...)."""
    assert isinstance(scores, Var)  # because it depends on the leaf
    outputs = value_of(scores).stored()
    seed = np.zeros((len(classes), *outputs.image_shape), np.float32)
    for row, label in zip(seed, classes, strict=True):
        if has_one_score(net):
            row[...] = np.sign(label * 2 - 1) if label >= 0 else 0
        elif label >= 0:
            row[label] = 1
    gradients = backward(scores, local_value(seed, outputs))
    local: np.ndarray = gradients[leaf].local()
    return local


def scores_of(net: Network, images: Value) -> Value:
    """Return the outputs of the network before softmax or sigmoid."""
    return net.logits(images, last_activation(net))
