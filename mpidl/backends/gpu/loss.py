"""Softmax and cross-entropy by kernels/cuda/loss.cu, in double."""

import numpy as np

from mpidl.backends.gpu import array, fold, run
from mpidl.backends.gpu.dense import rows_of
from mpidl.fold import Late

THREADS = 512  # a warp for each of a block's images


def softmax(logits):
    """exp(logits) / sum over classes; logits (B, K, 16), computed in float64."""
    _, classes = rows_of(logits, "softmax")
    p = array.empty_like(logits, np.float64)
    run.launch("loss_softmax", logits.dims[0], THREADS, logits, p, classes)
    return p


def softmax_dx(dy, p):
    """The gradient behind `softmax`, whose result p is (B, K, 16) float64: in dy's type."""
    _, classes = rows_of(dy, "softmax_dx")
    dx = array.empty_like(dy)
    run.launch("loss_softmax_dx", dy.dims[0], THREADS, dy, p, dx, classes)
    return dx


def cross_entropy(logits, labels, counts, tree):
    """Partial of the sum over images of -log softmax(logits)[label], one number in float64."""
    return _summed("loss_cross_entropy", logits, labels, counts, tree)


def cross_entropy_dlogits(logits, labels, scale, counts):
    """(softmax(logits) - one at the label) * scale, zero in unused images: as logits.

    scale: a number, or one that is read when the kernel runs (`fold.Late`).
    """
    _, classes = rows_of(logits, "cross_entropy_dlogits")
    late = isinstance(scale, Late)
    factor, number = (scale.factor, scale.array) if late else (float(scale), None)
    d = array.empty_like(logits)
    run.launch(
        "loss_dlogits",
        logits.dims[0],
        THREADS,
        logits,
        labels,
        counts,
        factor,
        number,
        d,
        classes,
    )
    return d


def correct_count(logits, labels, counts, tree):
    """Partial of how many images' largest logit, the first of equal ones, is their label's."""
    return _summed("loss_correct", logits, labels, counts, tree)


def _summed(kernel, logits, labels, counts, tree):
    _, classes = rows_of(logits, kernel)
    blocks = logits.dims[0]
    rows = array.empty((blocks, 1), np.float64)
    run.launch(kernel, blocks, THREADS, logits, labels, counts, rows, classes)
    return fold.partial_of_leaves(rows, tree, 1, shape=())
