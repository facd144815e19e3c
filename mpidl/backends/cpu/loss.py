"""Softmax, cross-entropy and errors by the C kernels."""

import math

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import partial_of_rows, tree_of


def _sizes(x):
    """(blocks, classes, pixels) of scores (B, K, ..., 16)."""
    return *x.shape[:2], math.prod(x.shape[2:-1])


def _labels(labels):
    return np.ascontiguousarray(labels, np.int32)


def softmax(logits):
    """exp(logits) / sum over classes; logits (B, K, ..., 16), computed in float64."""
    p = arenas.empty(logits.shape, np.float64)
    kernels().softmax(np.ascontiguousarray(logits), p, *_sizes(logits))
    return p


def softmax_dx(dy, p):
    """The gradient behind `softmax`, whose result p is float64: as dy, (B, K, ..., 16)."""
    dx = arenas.empty(dy.shape)
    kernels().softmax_dx(np.ascontiguousarray(dy), np.ascontiguousarray(p), dx, *_sizes(dy))
    return dx


def cross_entropy(logits, labels, counts, tree):
    """Partial of the sum over images and pixels of -log softmax(logits)[label], one number in
    float64."""
    return _summed(kernels().cross_entropy, logits, labels, counts, tree)


def cross_entropy_dlogits(logits, labels, scale, counts):
    """(softmax(logits) - one at the label) * scale, zero in unused lanes: as logits."""
    d = arenas.empty(logits.shape)
    logits = np.ascontiguousarray(logits)
    kernels().cross_entropy_dlogits(logits, _labels(labels), counts, scale, d, *_sizes(logits))
    return d


def correct_count(logits, labels, counts, tree):
    """Partial of how many images', or pixels', largest logit, the first of equal ones, is their
    label's."""
    return _summed(kernels().correct_count, logits, labels, counts, tree)


def _summed(function, logits, labels, counts, tree):
    rows = np.empty(len(logits))
    logits = np.ascontiguousarray(logits)
    function(logits, _labels(labels), counts, rows, *_sizes(logits), tree_of(tree))
    return partial_of_rows(rows, tree)


def errors(y, target, power, counts, tree):
    """Partial of the sum over images and elements of |y - target| ** power, one number in float64.

    y, target: (B, ..., 16); power: 1 or 2.
    """
    rows = np.empty(len(y))
    kernels().errors(*_pair(y, target), power, counts, rows, *_elements(y), tree_of(tree))
    return partial_of_rows(rows, tree)


def errors_dy(y, target, power, scale, counts):
    """(y - target) * scale where power is 2, its sign * scale where that is 1: as y, zero in unused
    lanes."""
    d = arenas.empty(y.shape)
    kernels().errors_dy(*_pair(y, target), power, scale, counts, d, *_elements(y))
    return d


def _pair(y, target):
    return np.ascontiguousarray(y), np.ascontiguousarray(target)


def _elements(y):
    """(blocks, elements of an image)."""
    return len(y), math.prod(y.shape[1:-1])
