"""Softmax and cross-entropy by the C kernels."""

import numpy as np

from mpidl.backends import memory
from mpidl.backends.cpu.call import partial_of_rows, tree_of
from mpidl.backends.native import kernels


def _labels(labels):
    return np.ascontiguousarray(labels, np.int32)


def softmax(logits):
    """exp(logits) / sum over classes; logits (B, K, 16), computed in float64."""
    p = memory.empty(logits.shape, np.float64)
    kernels().softmax(np.ascontiguousarray(logits), p, *logits.shape[:2])
    return p


def cross_entropy(logits, labels, counts, tree):
    """Partial of the sum over images of -log softmax(logits)[label], one number in float64."""
    return _summed(kernels().cross_entropy, logits, labels, counts, tree)


def cross_entropy_dlogits(logits, labels, scale, counts):
    """(softmax(logits) - one at the label) * scale, zero in unused lanes: as logits."""
    d = memory.empty(logits.shape)
    logits = np.ascontiguousarray(logits)
    kernels().cross_entropy_dlogits(logits, _labels(labels), counts, scale, d, *logits.shape[:2])
    return d


def correct_count(logits, labels, counts, tree):
    """Partial of how many images' largest logit, the first of equal ones, is their label's."""
    return _summed(kernels().correct_count, logits, labels, counts, tree)


def _summed(function, logits, labels, counts, tree):
    rows = np.empty(len(logits))
    logits = np.ascontiguousarray(logits)
    function(logits, _labels(labels), counts, rows, *logits.shape[:2], tree_of(tree))
    return partial_of_rows(rows, tree)
