"""Compute softmax, losses and their gradients in double precision with kernels/cuda/loss.cu.

Scores are stored in rows of K numbers, where K is the number of classes. There is one row per image
or, in semantic segmentation, one row per pixel.
"""

import math
from typing import NamedTuple

import numpy as np

from mpidl.backends.gpu import array, fold, launching
from mpidl.backends.gpu.dense import rows_of
from mpidl.backends.gpu.elementwise import scale_of
from mpidl.backends.training_interface import PLAIN, PLAIN_BINARY
from mpidl.core.blocks import LANES
from mpidl.core.fold import Late

ROWS = 16  # rows of scores per block of threads, one per warp
THREADS = 32 * ROWS
SUMS = "loss_of_labels", "loss_of_targets", "loss_of_elements", "loss_errors", "loss_label_weight"
SUM, COUNT = 0, 1  # the sums of a kernel: the terms of a loss, or correct predictions


class Leaf(NamedTuple):
    """Limits that determine the size of the leaves (partial sums) of a sum over images."""

    threads: int  # threads per block
    smallest: int  # images with fewer rows (or elements) share a leaf
    largest: int  # images with more rows (or elements) are split into several leaves


OF_ROWS, OF_ELEMENTS = Leaf(THREADS, ROWS, 16 * ROWS), Leaf(256, 256, 4096)


def pixels_of(scores, name):
    """Return (rows, pixels per image, classes) of scores (B, K, 16) or (B, K, H, W, 16)."""
    if scores.ndim == 3:
        rows, classes = rows_of(scores, name)
        return rows, 1, classes
    if scores.ndim != 5 or scores.dims != scores.shape or scores.order != array.IMAGES:
        raise ValueError(
            f"{name}: expected (blocks, K, 16) or images (blocks, K, H, W, 16), got {scores}"
        )
    blocks, classes, height, width, _ = scores.dims
    return blocks * LANES * height * width, height * width, classes


def softmax(logits):
    rows, _, classes = pixels_of(logits, "softmax")
    p = array.empty_like(logits, np.float64)
    launching.launch("loss_softmax", rows // ROWS, THREADS, logits, p, classes)
    return p


def softmax_dx(dy, p):
    rows, _, classes = pixels_of(dy, "softmax_dx")
    dx = array.empty_like(dy)
    launching.launch("loss_softmax_dx", rows // ROWS, THREADS, dy, p, dx, classes)
    return dx


def cross_entropy(logits, labels, counts, tree, rule=PLAIN):
    return _of_labels(SUM, logits, labels, counts, tree, rule)


def cross_entropy_dlogits(logits, labels, scale, counts, rule=PLAIN):
    rows, pixels, classes = pixels_of(logits, "cross_entropy_dlogits")
    d = array.empty_like(logits)
    arrays = logits, by_image(labels, "cross_entropy_dlogits"), counts
    numbers = *scale_of(scale), d, *_rule(rule), classes, pixels
    launching.launch("loss_dlogits", rows // ROWS, THREADS, *arrays, *numbers)
    return d


def label_weight(labels, counts, tree, rule, classes):
    arrays = None, by_image(labels, "label_weight"), counts
    numbers, pixels = (_rule(rule)[0], classes), math.prod(labels.dims[1:-1])
    return _summed("loss_label_weight", SUM, arrays, numbers, pixels, OF_ROWS, tree)


def reciprocal(total):
    (root,) = total.roots
    inverse = launching.empty((1,), np.float64)
    launching.launch("loss_reciprocal", 1, 32, root, inverse)
    return Late(inverse)


def _rule(rule):
    weights = None if rule.class_weights is None else launching.constant(rule.class_weights)
    return weights, float(rule.smoothing), float(rule.gamma)


def correct_count(logits, labels, counts, tree):
    return _of_labels(COUNT, logits, labels, counts, tree)


def soft_cross_entropy(logits, targets, counts, tree, smoothing=0.0):
    return _of_targets(SUM, logits, targets, counts, tree, smoothing)


def soft_cross_entropy_dlogits(logits, targets, scale, counts, smoothing=0.0):
    rows, pixels, classes = pixels_of(logits, "soft_cross_entropy_dlogits")
    _, *order = _apart(logits, targets)
    d = array.empty_like(logits)
    numbers = *scale_of(scale), d, *order, float(smoothing), classes, pixels
    launching.launch("loss_soft_dlogits", rows // ROWS, THREADS, logits, targets, counts, *numbers)
    return d


def soft_correct_count(logits, targets, counts, tree):
    return _of_targets(COUNT, logits, targets, counts, tree)


def _of_targets(kind, logits, targets, counts, tree, smoothing=0.0):
    kernel, (_, *order) = "loss_of_targets", _apart(logits, targets)
    _, pixels, classes = pixels_of(logits, kernel)
    arrays, numbers = (logits, targets, counts), (*order, float(smoothing), classes)
    return _summed(kernel, kind, arrays, numbers, pixels, OF_ROWS, tree)


def _of_labels(kind, logits, labels, counts, tree, rule=PLAIN):
    kernel = "loss_of_labels"
    _, pixels, classes = pixels_of(logits, kernel)
    arrays, numbers = (logits, by_image(labels, kernel), counts), (*_rule(rule), classes)
    return _summed(kernel, kind, arrays, numbers, pixels, OF_ROWS, tree)


def binary_cross_entropy(logits, targets, counts, tree, rule=PLAIN_BINARY):
    return _of_elements(SUM, logits, targets, counts, tree, rule)


def binary_cross_entropy_dlogits(logits, targets, scale, counts, rule=PLAIN_BINARY):
    arrays, elements, order = _binary(logits, targets, counts)
    d = array.empty_like(logits)
    blocks, threads = launching.blocks_of_threads(logits.size), launching.THREADS
    numbers = *scale_of(scale), d, *_binary_rule(rule), logits.dims[1], *order
    launching.launch("loss_binary_dlogits", blocks, threads, *arrays, *numbers, elements, d.size)
    return d


def binary_correct_count(logits, targets, counts, tree):
    return _of_elements(COUNT, logits, targets, counts, tree)


def _of_elements(kind, logits, targets, counts, tree, rule=PLAIN_BINARY):
    elements, *order = _apart(logits, targets)
    numbers = *_binary_rule(rule), *order, logits.dims[1], int(targets.dtype.kind in "iu")
    arrays = logits, targets, counts
    return _summed("loss_of_elements", kind, arrays, numbers, elements, OF_ELEMENTS, tree)


def _binary(logits, targets, counts):
    """Return (arrays for a kernel, elements per image, (inner, outer)).

    The arrays are logits, float targets, int targets and counts. One of the two targets is None.
    `_apart` describes `inner` and `outer`.
    """
    elements, *order = _apart(logits, targets)
    pair = (None, targets) if targets.dtype.kind in "iu" else (targets, None)
    return (logits, *pair, counts), elements, order


def _binary_rule(rule):
    weights = None if rule.positive_weights is None else launching.constant(rule.positive_weights)
    return weights, float(rule.gamma)


def errors(y, target, power, counts, tree):
    elements, inner, outer = _apart(y, target)
    arrays, numbers = (y, target, counts), (inner, outer)
    return _summed("loss_errors", power, arrays, numbers, elements, OF_ELEMENTS, tree)


def errors_dy(y, target, power, scale, counts):
    elements, inner, outer = _apart(y, target)
    d = array.empty_like(y)
    blocks, threads = launching.blocks_of_threads(y.size), launching.THREADS
    numbers = *scale_of(scale), d, inner, outer, power, elements, y.size
    launching.launch("loss_errors_dy", blocks, threads, y, target, counts, *numbers)
    return d


def by_image(labels, name):
    if not _by_image(labels):
        raise ValueError(f"{name}: expected labels stored image by image, got {labels}")
    return labels


def _by_image(value):
    """Return whether the value is stored image by image, in the memory order of `array.lanes`."""
    orders = value.order, array.order_of_lanes(value.dims)
    first, second = ([axis for axis in order if value.dims[axis] > 1] for order in orders)
    return first == second


def _apart(y, target):
    """Return (elements per image, inner, outer), which relate the memory orders of y and target.

    Element k of an image of y corresponds to element k % inner * outer + k // inner of the target.
    Images are stored pixel by pixel, even if they are flattened. Other values are stored in feature
    order.
    """
    elements = math.prod(y.dims[1:-1])
    of_y, of_target = _pixel_by_pixel(y), _pixel_by_pixel(target)
    one_order = elements, 1
    if of_y == of_target:
        return elements, *one_order
    if of_target == one_order:
        return elements, *of_y
    if of_y == one_order:
        return elements, *of_target[::-1]
    raise ValueError(
        f"errors: expected y and target of one layout, got {of_y[0]} channels of {of_y[1]} pixels "
        f"and {of_target[0]} channels of {of_target[1]} pixels per image"
    )


def _pixel_by_pixel(value):
    """Return (channels, pixels), or (elements, 1) if pixel order and feature order are the same."""
    if not _by_image(value):
        raise ValueError(f"errors: expected values stored image by image, got {value}")
    elements, channels = math.prod(value.dims[1:-1]), value.dims[1]
    if len(value.dims) != 5 or channels == 1:
        return elements, 1
    return channels, elements // channels


def _summed(kernel, kind, arrays, numbers, size, leaf, tree):
    """Return the sum over all images, and over the `size` rows or elements per image, as a Partial.

    A leaf is the sum over several images of a block, one image, or a part of an image. The choice
    depends only on `size` and the limits `leaf`. The order of additions therefore does not depend
    on the number of blocks or ranks. In a recorded step, sums of one kernel go out in one launch.
    """
    images, parts = 1, 1
    while images < LANES and images * size < leaf.smallest:
        images *= 2
    while -(-size // parts) > leaf.largest:
        parts *= 2
    chunk = -(-images * size // parts)
    per_block = LANES // images * parts
    y, target, counts = arrays
    if y is not None and y.dtype != np.float32:
        raise TypeError(f"{kernel}: expected float32, got {y}")
    if target.dtype not in (np.float32, np.int32):
        raise TypeError(f"{kernel}: expected targets of float32 or int32, got {target}")
    leaves = array.empty((target.dims[0] * per_block, 1), np.float64)
    geometry = size, images, parts, chunk, len(leaves), kind
    row = [y, target, counts, leaves, *geometry, *map(_word, numbers)]
    launching.later(kernel, row, [leaves], len(leaves), leaf.threads)
    return fold.partial_of_leaves(leaves, tree, per_block, shape=())


def _word(number):
    """Return a number for a Table: of a float, its bits."""
    return int(np.float64(number).view(np.int64)) if isinstance(number, float) else number
