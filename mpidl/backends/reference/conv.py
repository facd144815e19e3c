"""Compute convolutions in NumPy: unfold each block of 16 images for a matrix product per group.

The module `direct` computes convolutions of images in bfloat16, whose sums have a defined order.
"""

import numpy as np

from mpidl.backends import shapes
from mpidl.backends.reference import direct
from mpidl.backends.reference.batchnorm import channel_sums
from mpidl.backends.reference.bf16 import as_type, narrowed, operand, widened
from mpidl.core.fold import Counter
from mpidl.core.values import BF16


class _Columns:
    """Unfolds padded blocks into a matrix (C*R*S, P*Q*16), and folds such a matrix back.

    The product of the weights and this matrix is the convolution (Chellapilla et al., "High
    performance convolutional neural networks for document processing", 2006). All blocks use the
    same two buffers, `padded` and `columns`.
    """

    def __init__(self, x, weight_shape, geometry):
        stride, padding, dilation, _ = geometry
        (c, h, w, lanes), (_, _, r, s) = x.shape[1:], weight_shape
        (top, bottom), (left, right) = padding
        _, p, q = shapes.conv2d_shape((c, h, w), weight_shape, stride, padding, dilation)
        self.padded = np.zeros((c, h + top + bottom, w + left + right, lanes), x.dtype)
        self.image = self.padded[:, top : top + h, left : left + w]
        self.columns = np.empty((c, r, s, p, q, lanes), x.dtype)
        self.rows = (c, r * s, p * q * lanes)
        self.taps = [
            (
                i,
                j,
                slice(i * dilation[0], i * dilation[0] + stride[0] * (p - 1) + 1, stride[0]),
                slice(j * dilation[1], j * dilation[1] + stride[1] * (q - 1) + 1, stride[1]),
            )
            for i in range(r)
            for j in range(s)
        ]

    def groups(self, matrix, groups):
        """Reshape an unfolded matrix to (groups, C/groups*R*S, P*Q*16)."""
        c, taps, pixels = self.rows
        return matrix.reshape(groups, c // groups * taps, pixels)

    def unfold(self, block):
        self.image[...] = block
        for i, j, down, across in self.taps:
            self.columns[:, i, j] = self.padded[:, down, across]
        return self.columns

    def fold_back(self, out):
        """Add each element of `columns` to its pixel of the block, and write the block to `out`."""
        self.padded[...] = 0
        for i, j, down, across in self.taps:
            self.padded[:, down, across] += self.columns[:, i, j]
        out[...] = self.image


def conv2d(x, weight, bias, geometry):
    x = operand(x)
    if x.dtype == BF16:
        return narrowed(direct.conv2d(widened(x), weight, bias, geometry))
    shape, groups = shapes.conv2d_shape(x.shape[1:-1], weight.shape, *geometry[:3]), geometry.groups
    y = np.empty((len(x), *shape, x.shape[-1]), x.dtype)
    columns = _Columns(x, weight.shape, geometry)
    filters = weight.reshape(groups, len(weight) // groups, -1)
    for b in range(len(x)):
        out = y[b].reshape(groups, len(weight) // groups, -1)
        matrix = columns.groups(columns.unfold(x[b]), groups)
        for g in range(groups):
            np.matmul(filters[g], matrix[g], out=out[g])
    if bias is not None:
        y += bias[:, None, None, None]
    return y


def conv2d_dx(dy, x, weight, geometry, bias=None):
    """Return the gradient with respect to x, plus bias. Only the shape and dtype of x are used."""
    if x.dtype == BF16:
        return narrowed(direct.conv2d_dx(widened(dy), x.shape[1:-1], weight, geometry, bias))
    dx, groups = np.empty_like(x), geometry.groups
    columns = _Columns(x, weight.shape, geometry)
    filters = weight.reshape(groups, len(weight) // groups, -1)
    matrix = columns.groups(columns.columns, groups)
    for b in range(len(x)):
        out = dy[b].reshape(groups, len(weight) // groups, -1)
        for g in range(groups):
            np.matmul(filters[g].T, out[g], out=matrix[g])
        columns.fold_back(dx[b])
    if bias is not None:
        dx += bias[:, None, None, None]
    return dx


def conv2d_dweight(dy, x, weight, geometry, tree):
    """Return the gradient with respect to weight. Only the shape and dtype of weight are used."""
    counter, groups = Counter(tree), geometry.groups
    if x.dtype == BF16:
        for leaf in direct.conv2d_dweight(widened(dy), widened(x), weight, geometry):
            counter.push(leaf)
        return counter.partial(weight.shape, np.float32)
    columns = _Columns(x, weight.shape, geometry)
    for b in range(len(x)):
        matrix = columns.groups(columns.unfold(x[b]), groups)
        out = dy[b].reshape(groups, len(weight) // groups, -1)
        leaf = np.empty((groups, out.shape[1], matrix.shape[1]), weight.dtype)
        for g in range(groups):
            np.matmul(out[g], matrix[g].T, out=leaf[g])
        counter.push(leaf.reshape(weight.shape))
    return counter.partial(weight.shape, weight.dtype)


def conv2d_backward(
    dy,
    x,
    weight,
    geometry,
    counts,
    tree,
    needs,
    activation_after=None,
    sums=False,
    overwrite=False,
):
    if activation_after is not None or sums:
        raise TypeError(
            "the reference stores all activations: expected no activation_after, no sums"
        )
    x = operand(x)
    dy = as_type(dy, x.dtype)
    return (
        conv2d_dx(dy, x, weight, geometry) if needs[0] else None,
        conv2d_dweight(dy, x, weight, geometry, tree) if needs[1] else None,
        channel_sums(dy, tree) if needs[2] else None,
        None,  # no `activation_sums`: this backend has no DeferredInput
    )
