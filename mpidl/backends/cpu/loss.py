"""Compute softmax, losses, sums of errors and their gradients with the C kernels."""

import math

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.batchnorm import sizes
from mpidl.backends.cpu.builds import kernels
from mpidl.backends.cpu.call import partial_of_rows, tree_of
from mpidl.backends.training_interface import PLAIN, PLAIN_BINARY


def _labels(labels):
    return np.ascontiguousarray(labels, np.int32)


def softmax(logits):
    p = arenas.empty(logits.shape, np.float64)
    kernels().softmax(np.ascontiguousarray(logits), p, *sizes(logits))
    return p


def softmax_dx(dy, p):
    dx = arenas.empty(dy.shape)
    kernels().softmax_dx(np.ascontiguousarray(dy), np.ascontiguousarray(p), dx, *sizes(dy))
    return dx


def cross_entropy(logits, labels, counts, tree, rule=PLAIN):
    return _summed(kernels().cross_entropy, logits, labels, counts, tree, *_rule(rule))


def cross_entropy_dlogits(logits, labels, scale, counts, rule=PLAIN):
    d = arenas.empty(logits.shape)
    logits = np.ascontiguousarray(logits)
    arguments = logits, _labels(labels), counts, scale, d, *sizes(logits), *_rule(rule)
    kernels().cross_entropy_dlogits(*arguments)
    return d


def label_weight(labels, counts, tree, rule, classes):
    rows, pixels = np.empty(len(labels)), math.prod(labels.shape[1:-1])
    arguments = len(labels), classes, pixels, tree_of(tree), rule.class_weights
    kernels().label_weight(_labels(labels), counts, rows, *arguments)
    return partial_of_rows(rows, tree)


def _rule(rule):
    return rule.class_weights, rule.smoothing, rule.gamma


def correct_count(logits, labels, counts, tree):
    return _summed(kernels().correct_count, logits, labels, counts, tree)


def soft_cross_entropy(logits, targets, counts, tree, smoothing=0.0):
    return _summed(kernels().soft_cross_entropy, logits, targets, counts, tree, smoothing)


def soft_cross_entropy_dlogits(logits, targets, scale, counts, smoothing=0.0):
    d = arenas.empty(logits.shape)
    arguments = *_pair(logits, targets), counts, scale, d, *sizes(logits), smoothing
    kernels().soft_cross_entropy_dlogits(*arguments)
    return d


def soft_correct_count(logits, targets, counts, tree):
    return _summed(kernels().soft_correct_count, logits, targets, counts, tree)


def _summed(function, logits, labels, counts, tree, *rule):
    rows = arenas.empty((len(logits),), np.float64)
    logits = np.ascontiguousarray(logits)
    is_soft = labels.dtype.kind == "f"
    labels = np.ascontiguousarray(labels, np.float32) if is_soft else _labels(labels)
    function(logits, labels, counts, rows, *sizes(logits), tree_of(tree), *rule)
    return partial_of_rows(rows, tree)


def binary_cross_entropy(logits, targets, counts, tree, rule=PLAIN_BINARY):
    rows, arrays = arenas.empty((len(logits),), np.float64), _binary(logits, targets)
    function = kernels().binary_cross_entropy
    function(*arrays, counts, rows, *sizes(logits), tree_of(tree), *rule)
    return partial_of_rows(rows, tree)


def binary_cross_entropy_dlogits(logits, targets, scale, counts, rule=PLAIN_BINARY):
    d, arrays = arenas.empty(logits.shape), _binary(logits, targets)
    kernels().binary_cross_entropy_dlogits(*arrays, counts, scale, d, *sizes(logits), *rule)
    return d


def binary_correct_count(logits, targets, counts, tree):
    rows, arrays = arenas.empty((len(logits),), np.float64), _binary(logits, targets)
    kernels().binary_correct_count(*arrays, counts, rows, *sizes(logits), tree_of(tree))
    return partial_of_rows(rows, tree)


def _binary(logits, targets):
    """Return (logits, float targets, int targets). One of the two targets is None."""
    logits = np.ascontiguousarray(logits)
    if targets.dtype.kind in "iu":
        return logits, None, _labels(targets)
    return logits, np.ascontiguousarray(targets, np.float32), None


def errors(y, target, power, counts, tree):
    rows = arenas.empty((len(y),), np.float64)
    kernels().errors(*_pair(y, target), power, counts, rows, *_elements(y), tree_of(tree))
    return partial_of_rows(rows, tree)


def errors_dy(y, target, power, scale, counts):
    d = arenas.empty(y.shape)
    kernels().errors_dy(*_pair(y, target), power, scale, counts, d, *_elements(y))
    return d


def _pair(y, target):
    return np.ascontiguousarray(y), np.ascontiguousarray(target)


def _elements(y):
    """Return (number of blocks of 16 images, number of elements per image)."""
    return len(y), math.prod(y.shape[1:-1])
