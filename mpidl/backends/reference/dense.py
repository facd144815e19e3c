"""Compute fully connected layers in NumPy, with one matrix product per block of 16 images."""

import numpy as np

from mpidl.backends.reference.batchnorm import channel_sums
from mpidl.core.fold import Counter


def dense(x, weight, bias):
    y = np.empty((len(x), len(weight), x.shape[-1]), x.dtype)
    for block, out in zip(x, y, strict=True):
        np.matmul(weight, block, out=out)
    if bias is not None:
        y += bias[:, None]
    return y


def dense_dx(dy, weight):
    dx = np.empty((len(dy), weight.shape[1], dy.shape[-1]), dy.dtype)
    for grad, out in zip(dy, dx, strict=True):
        np.matmul(weight.T, grad, out=out)
    return dx


def dense_dweight(dy, x, tree):
    counter = Counter(tree)
    for grad, block in zip(dy, x, strict=True):
        counter.push(grad @ block.T)
    return counter.partial((dy.shape[1], x.shape[1]), x.dtype)


def dense_backward(dy, x, weight, tree, needs):
    return (
        dense_dx(dy, weight) if needs[0] else None,
        dense_dweight(dy, x, tree) if needs[1] else None,
        channel_sums(dy, tree) if needs[2] else None,
        None,  # no `activation_sums`: this backend has no DeferredInput
    )
