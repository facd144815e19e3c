"""Compute softmax, losses, sums of errors and their gradients in NumPy.

The module `backends.training_interface` documents the functions.
"""

import numpy as np

from mpidl.backends.training_interface import PLAIN, PLAIN_BINARY
from mpidl.core.fold import Counter


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
    """Return (labels, valid, class weights). Invalid labels, outside 0..K-1, are replaced by 0."""
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
        valid = (label >= 0) & (label < len(block))
        is_right = (block.argmax(axis=0) == label).astype(np.float64)
        is_right[valid & np.isnan(block).any(axis=0)] = np.nan
        out[...] = _of_images(is_right)
    return image_sums(right, counts, tree)


def soft_cross_entropy(logits, targets, counts, tree, smoothing=0.0):
    losses = np.empty((len(logits), logits.shape[-1]), np.float64)
    for block, target, out in zip(logits, targets, losses, strict=True):
        z = block - block.max(axis=0).astype(np.float64)
        logs = z - np.log(np.exp(z).sum(axis=0))
        out[...] = -_of_images(_smoothed(target, smoothing) * logs)
    return image_sums(losses, counts, tree)


def soft_cross_entropy_dlogits(logits, targets, scale, counts, smoothing=0.0):
    d = softmax(logits)
    for block, target, images in zip(d, targets, counts, strict=True):
        q = _smoothed(target, smoothing)
        block *= q.sum(axis=0)
        block -= q
        block[..., images:] = 0
    d *= scale
    return d.astype(logits.dtype)


def soft_correct_count(logits, targets, counts, tree):
    right = np.empty((len(logits), logits.shape[-1]), np.float64)
    for block, target, out in zip(logits, targets, right, strict=True):
        predicted = block.argmax(axis=0)[None]
        chance = np.take_along_axis(target, predicted, axis=0).astype(np.float64)
        out[...] = _of_images(np.where(np.isnan(block).any(axis=0), np.nan, chance))
    return image_sums(right, counts, tree)


def _smoothed(target, smoothing):
    return (1 - smoothing) * target.astype(np.float64) + smoothing / len(target)


def binary_cross_entropy(logits, targets, counts, tree, rule=PLAIN_BINARY):
    losses = np.empty((len(logits), logits.shape[-1]), np.float64)
    for block, target, out in zip(logits, targets, losses, strict=True):
        positive, negative = _binary_weights(target, rule)
        p, q, log_p, log_q = _sigmoid_and_logs(block)
        loss = positive * q**rule.gamma * log_p + negative * p**rule.gamma * log_q
        out[...] = -_of_images(loss)
    return image_sums(losses, counts, tree)


def binary_cross_entropy_dlogits(logits, targets, scale, counts, rule=PLAIN_BINARY):
    d, gamma = np.empty(logits.shape, np.float64), rule.gamma
    for block, target, out, images in zip(logits, targets, d, counts, strict=True):
        positive, negative = _binary_weights(target, rule)
        p, q, log_p, log_q = _sigmoid_and_logs(block)
        up = negative * p**gamma * (p - gamma * q * log_q)
        down = positive * q**gamma * (q - gamma * p * log_p)
        out[...] = up - down
        out[..., images:] = 0
    d *= scale
    return d.astype(logits.dtype)


def _binary_weights(target, rule):
    """Return the factors of -log p and -log(1 - p). Both are 0 if a target is invalid."""
    t = target.astype(np.float64)
    valid = (target == 0) | (target == 1) if target.dtype.kind in "iu" else 1
    weights = 1.0 if rule.positive_weights is None else rule.positive_weights
    return valid * t * np.reshape(weights, (-1, *(1,) * (t.ndim - 1))), valid * (1 - t)


def _sigmoid_and_logs(x):
    """Return p = 1 / (1 + exp(-x)), 1 - p, log p and log(1 - p) in float64."""
    x = x.astype(np.float64)
    e = np.exp(-np.abs(x))
    larger, smaller, log = 1 / (1 + e), e / (1 + e), np.log1p(e)
    p, q = np.where(x >= 0, larger, smaller), np.where(x >= 0, smaller, larger)
    return p, q, np.minimum(x, 0) - log, -np.maximum(x, 0) - log


def binary_correct_count(logits, targets, counts, tree):
    right = np.empty((len(logits), logits.shape[-1]), np.float64)
    for block, target, out in zip(logits, targets, right, strict=True):
        label = target if target.dtype.kind in "iu" else target > 0.5
        is_right = ((block > 0) == label).astype(np.float64)
        is_right[np.isnan(block) & ((label == 0) | (label == 1))] = np.nan
        out[...] = _of_images(is_right)
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
