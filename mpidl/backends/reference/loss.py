"""Softmax, losses, error sums and their gradients in NumPy."""

import numpy as np

from mpidl.backends.training_interface import PLAIN
from mpidl.fold import Counter


def softmax(logits):
    probabilities = np.empty(logits.shape, np.float64)
    for block, out in zip(logits, probabilities, strict=True):
        np.exp(block - block.max(axis=0).astype(np.float64), out=out)
        out /= out.sum(axis=0)
    return probabilities


def softmax_dx(dy, p):
    return (p * (dy - (p * dy).sum(axis=1, keepdims=True))).astype(dy.dtype)


def cross_entropy(logits, labels, counts, tree, rule=PLAIN):
    losses = np.empty((len(labels), labels.shape[-1]), np.float64)
    for block, label, out in zip(logits, labels, losses, strict=True):
        z = block - block.max(axis=0).astype(np.float64)
        logs = z - np.log(np.exp(z).sum(axis=0))
        index, valid, weights = _weighted(label, rule, len(block))
        log_scores = np.take_along_axis(logs, index[None], axis=0)[0]
        focus = (1 - np.exp(log_scores)) ** rule.gamma if rule.gamma else 1.0
        loss = -(1 - rule.smoothing) * weights[index] * focus * log_scores
        if rule.smoothing:
            smooth = np.tensordot(weights, logs, axes=1)
            loss -= rule.smoothing / len(block) * smooth
        out[...] = _of_images(np.where(valid, loss, 0.0))
    return image_sums(losses, counts, tree)


def cross_entropy_dlogits(logits, labels, scale, counts, rule=PLAIN):
    d = softmax(logits)
    for block, label, images in zip(d, labels, counts, strict=True):
        classes = len(block)
        index, valid, weights = _weighted(label, rule, classes)
        p = np.take_along_axis(block, index[None], axis=0)[0]
        pull = (1 - rule.smoothing) * weights[index] * _focal_slope(p, rule.gamma)
        push = pull + rule.smoothing / classes * weights.sum()
        block *= push
        np.put_along_axis(
            block, index[None], np.take_along_axis(block, index[None], axis=0) - pull, axis=0
        )
        block -= (rule.smoothing / classes * weights).reshape(-1, *(1,) * label.ndim)
        block *= valid
        block[..., images:] = 0
    d *= scale
    return d.astype(logits.dtype)


def label_weight(labels, counts, tree, rule, classes):
    sums = np.empty((len(labels), labels.shape[-1]), np.float64)
    for label, out in zip(labels, sums, strict=True):
        index, valid, weights = _weighted(label, rule, classes)
        out[...] = _of_images(np.where(valid, weights[index], 0.0))
    return image_sums(sums, counts, tree)


def reciprocal(total):
    return 1.0 / float(total) if total else 0.0


def _weighted(label, rule, classes):
    """Return the labels with 0 for any outside 0..K-1, whether each is inside, and all weights."""
    valid = (label >= 0) & (label < classes)
    weights = np.ones(classes) if rule.class_weights is None else rule.class_weights
    return np.where(valid, label, 0), valid, weights


def _focal_slope(p, gamma):
    """Return the factor by which the focal loss changes the gradient of -log p."""
    if not gamma:
        return np.ones_like(p)
    rest = np.maximum(1 - p, np.finfo(np.float64).tiny)
    power = rest**gamma
    return power - gamma * p * power / rest * np.log(np.maximum(p, np.finfo(np.float64).tiny))


def correct_count(logits, labels, counts, tree):
    right = np.empty((len(labels), labels.shape[-1]), np.float64)
    for block, label, out in zip(logits, labels, right, strict=True):
        out[...] = _of_images(block.argmax(axis=0) == label)
    return image_sums(right, counts, tree)


def errors(y, target, power, counts, tree):
    sums = np.empty((len(y), y.shape[-1]), np.float64)
    for block, expected, out in zip(y, target, sums, strict=True):
        out[...] = _of_images(np.abs(np.subtract(block, expected, dtype=np.float64)) ** power)
    return image_sums(sums, counts, tree)


def errors_dy(y, target, power, scale, counts):
    d = np.subtract(y, target, dtype=np.float64)
    d = (d if power == 2 else np.sign(d)) * scale
    for block, valid in zip(d, counts, strict=True):
        block[..., valid:] = 0
    return d.astype(y.dtype)


def image_sums(x, counts, tree):
    counter = Counter(tree)
    for block, valid in zip(x, counts, strict=True):
        values = np.ascontiguousarray(block[..., :valid])
        counter.push(values.sum(axis=-1, dtype=np.float64))
    return counter.partial(x.shape[1:-1], np.float64)


def _of_images(values):
    """Sum `values` (..., 16) for each of the 16 images of a block; return an array (16,)."""
    return values.reshape(-1, values.shape[-1]).sum(axis=0)
