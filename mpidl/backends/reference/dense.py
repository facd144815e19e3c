"""Compute fully connected layers in NumPy, with one matrix product per block of 16 images.

The module `direct` computes layers that read bfloat16 numbers, whose sums have a defined order.
"""

import numpy as np

from mpidl.backends.reference import direct
from mpidl.backends.reference.batchnorm import channel_sums, ordered_sums
from mpidl.backends.reference.bf16 import as_type, narrowed, operand, rounded, widened
from mpidl.core.fold import Counter
from mpidl.core.values import BF16


def dense(x, weight, bias):
    x = operand(x)
    if x.dtype == BF16:
        return direct.dense(widened(x), weight, bias)
    y = np.empty((len(x), len(weight), x.shape[-1]), x.dtype)
    for block, out in zip(x, y, strict=True):
        np.matmul(weight, block, out=out)
    if bias is not None:
        y += bias[:, None]
    return y


def dense_dx(dy, weight):
    if operand(dy).dtype == BF16:
        return rounded(direct.dense_dx(dy, weight))
    dx = np.empty((len(dy), weight.shape[1], dy.shape[-1]), dy.dtype)
    for grad, out in zip(dy, dx, strict=True):
        np.matmul(weight.T, grad, out=out)
    return dx


def dense_dweight(dy, x, tree):
    counter, x = Counter(tree), operand(x)
    if x.dtype == BF16:
        leaves = direct.dense_dweight(dy, widened(x))
    else:
        leaves = (grad @ block.T for grad, block in zip(dy, x, strict=True))
    for leaf in leaves:
        counter.push(leaf)
    return counter.partial((dy.shape[1], x.shape[1]), dy.dtype)


def dense_backward(dy, x, weight, tree, needs):
    is_narrow = operand(x).dtype == BF16
    dx, sum_channels = None, ordered_sums if is_narrow else channel_sums
    if needs[0]:
        dx = narrowed(direct.dense_dx(dy, weight)) if is_narrow else dense_dx(dy, weight)
    return (
        None if dx is None else as_type(dx, x.dtype),
        dense_dweight(dy, x, tree) if needs[1] else None,
        sum_channels(dy, tree) if needs[2] else None,
        None,  # no `activation_sums`: this backend has no DeferredInput
    )
