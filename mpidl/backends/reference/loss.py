"""Softmax, losses, error sums and their gradients in NumPy."""

import numpy as np

from mpidl.fold import Counter


def softmax(logits):
    probabilities = np.empty(logits.shape, np.float64)
    for block, out in zip(logits, probabilities, strict=True):
        np.exp(block - block.max(axis=0).astype(np.float64), out=out)
        out /= out.sum(axis=0)
    return probabilities


def softmax_dx(dy, p):
    return (p * (dy - (p * dy).sum(axis=1, keepdims=True))).astype(dy.dtype)


def cross_entropy(logits, labels, counts, tree):
    losses = np.empty((len(labels), labels.shape[-1]), np.float64)
    for block, label, out in zip(logits, labels, losses, strict=True):
        z = block - block.max(axis=0).astype(np.float64)
        loss = np.log(np.exp(z).sum(axis=0))
        loss -= np.take_along_axis(z, label[None], axis=0)[0]
        out[...] = _of_images(loss)
    return image_sums(losses, counts, tree)


def cross_entropy_dlogits(logits, labels, scale, counts):
    d = softmax(logits)
    for block, label, valid in zip(d, labels, counts, strict=True):
        place = label[None]
        np.put_along_axis(block, place, np.take_along_axis(block, place, axis=0) - 1, axis=0)
        block[..., valid:] = 0
    d *= scale
    return d.astype(logits.dtype)


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
