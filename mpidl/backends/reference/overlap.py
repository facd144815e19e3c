"""Compute losses of the overlap of regions, and their gradients, in NumPy."""

import numpy as np

from mpidl.backends.reference.loss import image_sums
from mpidl.backends.training_interface import DICE


def overlap(p, labels, counts, tree, rule=DICE):
    blocks, classes, images = len(p), p.shape[1], p.shape[-1]
    losses, slopes = np.empty((blocks, images)), np.empty((blocks, 2, classes, images))
    weights = np.ones(classes) if rule.class_weights is None else rule.class_weights
    weights = (weights if rule.generalized else weights / weights.sum())[:, None]
    for b, (block, label) in enumerate(zip(p, labels, strict=True)):
        is_class, valid = _indicators(label, classes)
        block = np.where(valid, block, 0)
        pixels = tuple(range(1, block.ndim - 1))
        shared, sizes = (block * is_class).sum(axis=pixels), is_class.sum(axis=pixels)
        powers = block * block if rule.is_squared else block
        above = rule.above * shared
        below = rule.chances * powers.sum(axis=pixels) + rule.labelled * sizes + rule.below * shared
        if rule.generalized:
            factors = weights / _class_sizes(sizes) ** 2
            above, below = (factors * above).sum(axis=0), (factors * below).sum(axis=0)
        else:
            factors = weights
        smoothed = below + rule.smooth
        inverse = np.divide(1, smoothed, out=np.zeros_like(smoothed), where=smoothed != 0)
        similarity = (above + rule.smooth) * inverse
        loss = np.where(smoothed == 0, 0, 1 - similarity)  # NaN stays NaN
        losses[b] = loss if rule.generalized else (weights * loss).sum(axis=0)
        slopes[b, 0] = (rule.below * similarity - rule.above) * factors * inverse
        slopes[b, 1] = (2 if rule.is_squared else 1) * rule.chances * factors * similarity * inverse
    return image_sums(losses, counts, tree), slopes


def overlap_dp(p, labels, slopes, scale, counts, rule=DICE):
    d = np.empty_like(p)
    for block, label, slope, out, images in zip(p, labels, slopes, d, counts, strict=True):
        is_class, valid = _indicators(label, len(block))
        powers = block if rule.is_squared else 1
        of_class, of_p = slope.reshape(2, len(block), *(1,) * (label.ndim - 1), -1)
        out[...] = np.where(valid, (of_class * is_class + of_p * powers) * scale, 0)
        out[..., images:] = 0
    return d


def _indicators(label, classes):
    """Return whether each label is class k, (K, ..., 16), and whether it is valid, (..., 16)."""
    first = 1 if classes == 1 else 0
    numbers = np.arange(first, first + classes).reshape(-1, *(1,) * label.ndim)
    return label == numbers, (label >= 0) & (label < max(classes, 2))


def _class_sizes(counts):
    """Replace counts (K, 16) of 0 by the smallest other count of the image, or 1 without any."""
    largest = np.iinfo(counts.dtype).max
    smallest = np.where(counts > 0, counts, largest).min(axis=0)
    smallest = np.where(smallest < largest, smallest, 1)
    return np.where(counts > 0, counts, smallest).astype(np.float64)
