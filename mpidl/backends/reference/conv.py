"""NumPy backend, part of `reference`: convolution and transposed convolution. Shapes as there."""

import numpy as np

from mpidl.fold import Counter

PLAIN = (1, 1), 1  # dilation and groups of a convolution that has none


def conv2d_shape(x_shape, weight_shape, stride, padding, dilation):
    """(K, P, Q) of a convolution of one (C, H, W) image."""
    sizes = [
        (size + sum(pad) - d * (taps - 1) - 1) // s + 1
        for size, pad, d, taps, s in zip(
            x_shape[1:], padding, dilation, weight_shape[2:], stride, strict=True
        )
    ]
    return (weight_shape[0], *sizes)


class _Columns:
    """Unfolds padded blocks into the matrix (C*R*S, P*Q*16) whose product with the weights is the
    convolution (Chellapilla et al., "High performance convolutional neural networks for document
    processing", 2006), and folds such a matrix back. Its two buffers are reused by all blocks."""

    def __init__(self, x, weight_shape, stride, padding, dilation):
        (c, h, w, lanes), (_, _, r, s) = x.shape[1:], weight_shape
        (top, bottom), (left, right) = padding
        _, p, q = conv2d_shape((c, h, w), weight_shape, stride, padding, dilation)
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
        """The matrix as (groups, C/groups*R*S, P*Q*16)."""
        c, taps, pixels = self.rows
        return matrix.reshape(groups, c // groups * taps, pixels)

    def unfold(self, block):
        self.image[...] = block
        for i, j, down, across in self.taps:
            self.columns[:, i, j] = self.padded[:, down, across]
        return self.columns

    def fold_back(self, out):
        """Sum `columns` into the pixels they came from."""
        self.padded[...] = 0
        for i, j, down, across in self.taps:
            self.padded[:, down, across] += self.columns[:, i, j]
        out[...] = self.image


def conv2d(x, weight, bias, stride, padding, dilation, groups):
    """y = x * weight + bias (cross-correlation)."""
    shape = conv2d_shape(x.shape[1:-1], weight.shape, stride, padding, dilation)
    y = np.empty((len(x), *shape, x.shape[-1]), x.dtype)
    columns = _Columns(x, weight.shape, stride, padding, dilation)
    filters = weight.reshape(groups, len(weight) // groups, -1)
    for b in range(len(x)):
        out = y[b].reshape(groups, len(weight) // groups, -1)
        matrix = columns.groups(columns.unfold(x[b]), groups)
        for g in range(groups):
            np.matmul(filters[g], matrix[g], out=out[g])
        y[b] += bias[:, None, None, None]
    return y


def conv2d_dx(dy, x, weight, stride, padding, dilation, groups):
    """Gradient with respect to x; of x only shape and type are used."""
    dx = np.empty_like(x)
    columns = _Columns(x, weight.shape, stride, padding, dilation)
    filters = weight.reshape(groups, len(weight) // groups, -1)
    matrix = columns.groups(columns.columns, groups)
    for b in range(len(x)):
        out = dy[b].reshape(groups, len(weight) // groups, -1)
        for g in range(groups):
            np.matmul(filters[g].T, out[g], out=matrix[g])
        columns.fold_back(dx[b])
    return dx


def conv2d_dweight(dy, x, weight, stride, padding, dilation, groups, tree):
    """Partial of the gradient with respect to weight; of weight only shape and type are used."""
    columns = _Columns(x, weight.shape, stride, padding, dilation)
    counter = Counter(tree)
    for b in range(len(x)):
        matrix = columns.groups(columns.unfold(x[b]), groups)
        out = dy[b].reshape(groups, len(weight) // groups, -1)
        leaf = np.empty((groups, out.shape[1], matrix.shape[1]), weight.dtype)
        for g in range(groups):
            np.matmul(out[g], matrix[g].T, out=leaf[g])
        counter.push(leaf.reshape(weight.shape))
    return counter.partial(weight.shape, weight.dtype)


def channel_sums(x, tree):
    """Partial of the sum over images and pixels: (C,). Unused lanes of x must be zero."""
    counter = Counter(tree)
    for block in x:
        counter.push(block.reshape(len(block), -1).sum(axis=1))
    return counter.partial(x.shape[1:2], x.dtype)


def transposed_conv2d_shape(x_shape, weight_shape, stride, cropping):
    """(K, P, Q) of a transposed convolution of one (C, H, W) image, weight (C, K, R, S)."""
    sizes = [
        s * (size - 1) + taps - sum(crop)
        for size, taps, s, crop in zip(x_shape[1:], weight_shape[2:], stride, cropping, strict=True)
    ]
    return (weight_shape[1], *sizes)


def transposed_conv2d(x, weight, bias, stride, cropping):
    """The gradient with respect to its images of the convolution by `weight`, where x is the
    cotangent of its output, + bias; x (B, C, H, W, 16), weight (C, K, R, S), y (B, K, P, Q, 16)."""
    shape = transposed_conv2d_shape(x.shape[1:-1], weight.shape, stride, cropping)
    like = np.empty((len(x), *shape, x.shape[-1]), x.dtype)
    y = conv2d_dx(x, like, weight, stride, cropping, *PLAIN)
    y += bias[:, None, None, None]
    return y


def transposed_conv2d_backward(dy, x, weight, stride, cropping, counts, tree, needs):
    """(dx, dweight, dbias): the gradients that `needs` wants, None for the others. The convolution
    of dy by `weight`, and its gradient with respect to the weights for the cotangent x."""
    how = stride, cropping, *PLAIN
    none = np.zeros(len(weight), dy.dtype)
    return (
        conv2d(dy, weight, none, *how) if needs[0] else None,
        conv2d_dweight(x, dy, weight, *how, tree) if needs[1] else None,
        channel_sums(dy, tree) if needs[2] else None,
    )
